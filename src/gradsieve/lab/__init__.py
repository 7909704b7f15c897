"""The laboratory behind the `gradsieve` command: training, benchmarks, baselines, plots, networks. Extra `lab`.

- `rank_processes`: ranks as local processes.
- `network`: slow networks on one machine, made of network namespaces.
- `models`, `data`, `workloads`: what is trained.
- `baselines`: competing methods, DDP and the hooks that come with torch.
- `train`: one training run, and several that are compared.
- `bench`: measurements, all reported in one form.
- `plots`: all plots.
"""
