"""The cost of faults: three real sites, and a seeded schedule of kills, cuts and full disks."""
