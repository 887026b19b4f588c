"""`dilocox availability RUN`: samples pieces that sites hold, and rebuilds a record."""
