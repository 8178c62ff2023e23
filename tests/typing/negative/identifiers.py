"""Code that the type checker must reject, for the reason that stands at the end of the line. Never run."""

from mooncake_proto.control import Goodbye
from mooncake_proto.envelope import Envelope
from mooncake_proto.ids import BlockId, BlockKey, Incarnation, InstanceId, JobId, MessageId, NodeId, RequestId
from mooncake_proto.serving import CancelJob

request_id = RequestId("request-1")
instance_id = InstanceId("decode-0")
incarnation = Incarnation("0011223344556677")

Goodbye(instance_id=instance_id, incarnation=incarnation)
Goodbye(instance_id=request_id, incarnation=incarnation)  # rejected: arg-type
Goodbye(instance_id=NodeId("node-a"), incarnation=incarnation)  # rejected: arg-type
Goodbye(instance_id="decode-0", incarnation=incarnation)  # rejected: arg-type
Goodbye(instance_id=instance_id, incarnation=instance_id)  # rejected: arg-type
Goodbye(instance_id, incarnation)  # rejected: call-arg
CancelJob(job_id=JobId(request_id))
CancelJob(job_id=request_id)  # rejected: arg-type
Envelope(id=MessageId("1"), deadline_s="soon")  # rejected: arg-type
Envelope(id=MessageId("1")).deadline_s = 2.0  # rejected: misc
block: BlockId = BlockId(3)
block = 3  # rejected: assignment
key: BlockKey = b"key"  # rejected: assignment
