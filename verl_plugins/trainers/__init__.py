"""The one trainer of ours (`sync`) and what it keeps: liveness of the actors (`liveness`), the metric log."""
