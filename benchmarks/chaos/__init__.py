"""What faults cost a run: a seeded schedule of kills, cuts and full disks, three real sites."""
