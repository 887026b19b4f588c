"""Client of the coordinator, used by ranks and tools: enrolment, calls with retries, heartbeats."""
