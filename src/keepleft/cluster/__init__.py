"""Many machines, by Ray: replicas of the server, and workers of batch jobs. Only this room imports Ray."""
