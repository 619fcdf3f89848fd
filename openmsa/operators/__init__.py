# SPDX-License-Identifier: MIT
"""The public functions are operators of `torch.library` in the graphs of `torch.compile` and `torch.export`.

Eager calls never come here. `import openmsa` registers the operators, which is what `torch.export.load` needs.
"""

from openmsa.operators import results
from openmsa.operators.operator import OPERATORS, Operator
from openmsa.operators.plans import RunOperator, SelectOperator

__all__ = ["OPERATORS", "Operator"]

Operator("openmsa::block_scores", results.block_scores)
Operator("openmsa::select_blocks", results.select_blocks, writes=("rescored",), gradients=False)
Operator("openmsa::select_blocks_from_scores", results.select_blocks_from_scores, gradients=False)
Operator("openmsa::sparse_attention", results.sparse_attention)
Operator("openmsa::dense_attention", results.dense_attention)
Operator("openmsa::index_loss", results.index_loss)
Operator("openmsa::msa_attention", results.msa_attention)
Operator("openmsa::append_kv", results.nothing, writes=("self.k", "self.v", "self.seq_lens"), gradients=False)
Operator("openmsa::append_index_keys", results.nothing, writes=("self.keys", "self.seq_lens"), gradients=False)
Operator("openmsa::dequantize", results.dequantize, gradients=False)
Operator("openmsa::fill", results.nothing, writes=("self",), gradients=False)
RunOperator("openmsa::run_decode_plan", results.nothing, writes=("out",), gradients=False)
SelectOperator("openmsa::plan_select", results.plan_select, gradients=False, copies=True)
Operator("openmsa::plan_attend", results.plan_attend, writes=("out", "lse"), gradients=False)
