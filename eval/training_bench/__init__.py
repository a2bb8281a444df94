"""The training step against a naive one and against other trainers, each in a process of its own."""
