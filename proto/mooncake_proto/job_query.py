"""Whether a worker still has a job. A part of the conversation of serving.py."""

from dataclasses import dataclass

from mooncake_proto.codec import message
from mooncake_proto.ids import JobId


@message("serving.job_query")
@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """Gateway → worker, about a job of which nothing was heard for a while. Answered by JobStanding."""

    job_id: JobId


@message("serving.job_standing")
@dataclass(frozen=True, slots=True, kw_only=True)
class JobStanding:
    """``known``: the worker has the job and will say more of it. What else it had to say, it has said."""

    job_id: JobId
    known: bool
