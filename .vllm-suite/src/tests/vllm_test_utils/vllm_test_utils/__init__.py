# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vllm_utils is a package for vLLM testing utilities.
It does not import any vLLM modules.
"""

from .blame import BlameResult, blame
from .monitor import MonitoredValues, monitor

__all__ = ["blame", "BlameResult", "monitor", "MonitoredValues"]
