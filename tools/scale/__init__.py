"""What a run costs at many searchers, measured and extrapolated; ``tools/bench_scale.py`` runs it all."""
