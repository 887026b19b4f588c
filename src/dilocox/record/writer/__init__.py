"""What coordinator and ranks write into the record while a run goes on."""
