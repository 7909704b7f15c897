"""What people run: benchmarks, demonstrations, and the local workers they need. An extra: `gradsieve[lab]`."""
