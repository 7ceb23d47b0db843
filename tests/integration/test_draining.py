"""A machine of a Ray cluster that will be taken away."""

import asyncio
import time

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.core.generated import autoscaler_pb2

from outrider.fleet.ray_cluster import OBJECT_STORE_BYTES, Cluster, RayConnection
from outrider.replica.ray_actor import RayActor

pytestmark = pytest.mark.xdist_group("ranks")

PATIENCE_S = 30.0


async def test_nodes_that_are_drained_are_known() -> None:
    machine = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES}
    machines = RayCluster(
        initialize_head=True, head_node_args=machine | {"include_dashboard": False}
    )
    connection = RayConnection(machines.address, "outrider-test")
    try:
        one = machines.add_node(**machine | {"num_cpus": 1})
        await connection.connect()
        cluster = Cluster(connection.namespace, local=False)
        assert await cluster.draining() == frozenset()
        # Without an actor, the machine would end at once.
        actor = ray.remote(RayActor).options(num_cpus=1).remote()
        assert (await actor.ping.remote()).ray_node == one.node_id
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        gcs = ray._private.worker.global_worker.gcs_client
        deadline_ms = int(1e3 * (time.time() + PATIENCE_S))
        assert gcs.drain_node(one.node_id, reason, "", deadline_ms) == (True, "")
        async with asyncio.timeout(PATIENCE_S):
            while await cluster.draining() != {one.node_id}:
                await asyncio.sleep(0.1)
    finally:
        await connection.disconnect()
        machines.shutdown()
