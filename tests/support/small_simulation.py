"""Settings of a simulated rollout that takes milliseconds."""

SMALL = (
    *("Workload.num_groups=12", "Workload.group_size=4", "Workload.mean_tokens=300"),
    *("Workload.limit_tokens=2000", "SimulatedCluster.workers=3", "Simulate.chunk_tokens=256"),
    "SimulatedCluster.kv_tokens=8000",
)
