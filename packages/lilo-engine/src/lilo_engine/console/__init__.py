"""Console: what a server did and does, for people: totals, the timeline of its lanes, reports of runs. Decides nothing."""
