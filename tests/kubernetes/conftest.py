"""What the tests of images and clusters share; they build other people's programs, so most are long."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for modules of these tests

import image as images


@pytest.fixture(scope="session")
def image():
    """The image of the Dockerfile, built."""
    if reason := images.why_not():
        pytest.skip(reason)
    return images.build()
