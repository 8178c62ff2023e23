"""What the tests of a deployment share: the image, made once."""

import pytest

from tests.deploy import podman


@pytest.fixture(scope="session")
def image() -> str:
    """Name of the image with a mesh of fake engines. Skips where no containers can be run."""
    reason = podman.unable()
    if reason is not None:
        pytest.skip(reason)
    podman.build_image()
    return podman.IMAGE
