"""The engine on the default model in bfloat16, beside what its users would run otherwise. `make bench-engine`.

All that is compared is measured in turn, round by round, in one process, from the same weights, with the same number
of threads. Settings and targets stand in `settings` and `targets`; the command writes docs/benchmarks.md.
"""
