# SPDX-License-Identifier: MIT
"""This room says what of a model's caches fits where, and how long a decode step takes by measured rates.

`Model` holds a model's sizes, `Request` what is to be served, `Machine` where; `plan` answers with a `Plan`.
"""

from openmsa.capacity.answer import Plan, plan
from openmsa.capacity.model import INDEX_ROW_BYTES, KV_ROW_BYTES, PRESETS, Model, Request
from openmsa.capacity.rates import GPUS, Gpu, Machine

__all__ = ["GPUS", "INDEX_ROW_BYTES", "KV_ROW_BYTES", "PRESETS", "Gpu", "Machine", "Model", "Plan", "Request", "plan"]
