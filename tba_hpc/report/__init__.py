"""Views of a run: terminal display, summary and HTML page. They read the run's files and change none."""
