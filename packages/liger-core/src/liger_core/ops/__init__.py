# SPDX-License-Identifier: Apache-2.0
"""The ops of this package: one line each."""

from liger_core.ops.add_layer_norm import add_layer_norm as add_layer_norm
from liger_core.ops.add_rms_norm import add_rms_norm as add_rms_norm
from liger_core.ops.attention_residual import attention_residual as attention_residual
from liger_core.ops.cross_entropy import cross_entropy as cross_entropy
from liger_core.ops.dyt import dyt as dyt
from liger_core.ops.embedding import embedding as embedding
from liger_core.ops.experts import experts as experts
from liger_core.ops.gated_rms_norm import gated_rms_norm as gated_rms_norm
from liger_core.ops.geglu import geglu as geglu
from liger_core.ops.group_norm import group_norm as group_norm
from liger_core.ops.jsd import jsd as jsd
from liger_core.ops.kl_div import kl_div as kl_div
from liger_core.ops.layer_norm import layer_norm as layer_norm
from liger_core.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from liger_core.ops.linear_divergence import linear_divergence as linear_divergence
from liger_core.ops.linear_log_prob import linear_log_prob as linear_log_prob
from liger_core.ops.lora_linear import lora_linear as lora_linear
from liger_core.ops.lora_linears import lora_linears as lora_linears
from liger_core.ops.merge_streams import merge_streams as merge_streams
from liger_core.ops.mix_streams import mix_streams as mix_streams
from liger_core.ops.modulated_layer_norm import modulated_layer_norm as modulated_layer_norm
from liger_core.ops.modulated_rms_norm import modulated_rms_norm as modulated_rms_norm
from liger_core.ops.poly_norm import poly_norm as poly_norm
from liger_core.ops.project_streams import project_streams as project_streams
from liger_core.ops.qk_norm_rope import qk_norm_rope as qk_norm_rope
from liger_core.ops.relu_squared import relu_squared as relu_squared
from liger_core.ops.rms_norm import rms_norm as rms_norm
from liger_core.ops.rope import rope as rope
from liger_core.ops.sinkhorn import sinkhorn as sinkhorn
from liger_core.ops.softmax import softmax as softmax
from liger_core.ops.sparsemax import sparsemax as sparsemax
from liger_core.ops.swiglu import swiglu as swiglu
from liger_core.ops.total_variation import total_variation as total_variation
