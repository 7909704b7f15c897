"""Data for the workloads: from the user's files, downloaded into a cache, generated, or part of every installation."""
