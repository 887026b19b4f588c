"""The ranks' side of the control plane: enrolment, calls with retries, heartbeats."""
