"""Names that applications use: none is renamed without an entry in the changelog."""

import lanekeeper

PUBLIC = {
    "Client", "ClientMisused", "Options", "Final", "Part", "Cancelled", "Depth", "Names", "Tracing",
    "BodiesFull", "InvalidArgument",
    "BodiesUnavailable", "BodyError",
    "LanekeeperError", "Problem", "NoReply", "NotAMessage", "NotEnded", "ReplyLost", "ControlRefused", "BrokerError",
    "BrokerUnreachable", "BrokerBlocked", "PublishRefused", "Rejected", "Unroutable", "ConfirmUnknown", "AccessRefused",
    "TopologyMismatch", "InvalidUrl", "Group", "GroupProgress",
}  # fmt: skip


def test_all_public_names_exist() -> None:
    assert set(lanekeeper.__all__) == PUBLIC
