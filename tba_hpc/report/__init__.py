"""What a user sees of a run: terminal display, summary, HTML page. Reads files, changes none of the run."""
