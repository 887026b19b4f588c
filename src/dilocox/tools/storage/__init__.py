"""`dilocox publish RUN --to URL`: puts a run's record into storage, in bundles."""
