"""Shows a run by its files: status, alerts, messages, summary, report, samples, audit and trackers."""
