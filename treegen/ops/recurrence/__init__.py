"""The gated delta rule and Mamba2, one token at a time, for rows that share states.

The state S of a head is a [k_dim, v_dim] matrix. A token with the key k, the value v, the log gate
g and the strength b changes it:

    S_t = exp(g_t) S_(t-1) + k_t u_t',   u_t = b_t (v_t - exp(g_t) S_(t-1)' k_t)

and reads S_t' q_t. With the sums G_t of log gates since some state S_0 this is

    S_t = exp(G_t) S_0 + sum over i of exp(G_t - G_i) k_i u_i'

So a row need not store S_t. It keeps an update list of its (k_i, u_i, G_i) and reads S_0, which
many rows share, in one matrix product for all of them. A row folds its list into a state of its own
once reading the list takes longer than reading that state.
"""

from treegen.ops.recurrence.api import convolve as convolve
from treegen.ops.recurrence.api import convolve_runs as convolve_runs
from treegen.ops.recurrence.api import fold_update_lists as fold_update_lists
from treegen.ops.recurrence.api import scan as scan
from treegen.ops.recurrence.api import step as step
from treegen.ops.recurrence.types import DeltaInputs as DeltaInputs
from treegen.ops.recurrence.types import DeltaStates as DeltaStates
from treegen.ops.recurrence.types import RowSlots as RowSlots
