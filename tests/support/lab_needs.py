"""What the tests of this room need of a machine."""

from __future__ import annotations

import sys

import pytest

from dilocox.tools.testbed import netns, testbed

NO_NETWORK = netns.unsupported_reason()
NO_LAB = testbed.unsupported_reason()
needs_network = pytest.mark.skipif(NO_NETWORK is not None, reason=str(NO_NETWORK))
needs_lab = pytest.mark.skipif(NO_LAB is not None, reason=str(NO_LAB))
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")
