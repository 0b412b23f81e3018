"""The interfaces of other packages that are private or undocumented: each is there, and named here.

A minor version may change any of them. pyproject.toml therefore bounds these packages by minor
version, and this test names what is gone when a bound is raised.
"""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch


class Private(NamedTuple):
    """A private interface.

    module: where it is. path: of attributes in the module. used_for: what treegen does with it.
    in_source: an attribute that instances of `path` get, which their class's source mentions.
    """

    module: str
    path: str
    used_for: str
    in_source: str = ""


MODELING = "transformers.modeling_utils"
PRIVATE = (
    # torch
    Private("torch", "_scaled_mm", "products of matrices in FP8"),
    Private("torch", "Tensor._version", "notes that a weight was written since it was prepared"),
    Private(
        "torch.ops.aten",
        "_scaled_dot_product_flash_attention_for_cpu.default",
        "attention with log-sum-exp on a CPU",
    ),
    Private("torch.ops.aten", "_scaled_dot_product_cudnn_attention", "attention by cuDNN"),
    Private("torch.ops.aten", "_flash_attention_forward", "attention of trunks by FlashAttention"),
    Private("torch.nn", "Module", "weights by name, put and taken away", "_parameters"),
    Private("torch.nn", "Module", "buffers moved into compiled regions", "_buffers"),
    Private(
        "torch.nn",
        "Module",
        "layers that were compiled run as they are again",
        "_compiled_call_impl",
    ),
    Private("torch._dynamo.config", "recompile_limit", "as many graphs as a model has layers"),
    Private("torch._dynamo.exc", "TorchDynamoException", "what cannot be compiled runs eagerly"),
    Private("torch._dynamo.exc", "FailOnRecompileLimitHit", "what cannot be compiled runs eagerly"),
    Private("torch._inductor.config", "get_config_copy", "settings that keep results reproducible"),
    Private("torch._inductor.custom_graph_pass", "CustomGraphPass", "the choice of experts, fused"),
    Private("torch._inductor.custom_graph_pass", "get_hash_for_files", "the compiler's cache key"),
    Private("torch.utils._python_dispatch", "TorchDispatchMode", "what a model asks of attention"),
    Private("torch.utils._pytree", "tree_leaves", "the tensors in a recurrent layer's arguments"),
    Private("torch.distributed.distributed_c10d", "_abort_process_group", "a rank that has died"),
    Private("torch.distributed.distributed_c10d", "_world.group_count", "a rank died in joining"),
    # transformers
    Private(
        "transformers",
        "PreTrainedConfig",
        "which attention function a model calls",
        "_attn_implementation",
    ),
    Private(
        "transformers",
        "PreTrainedConfig",
        "gives a module back as it was",
        "_attn_implementation_internal",
    ),
    Private(
        "transformers", "PreTrainedConfig", "how experts are computed", "_experts_implementation"
    ),
    Private(MODELING, "PreTrainedModel._keep_in_fp32_modules", "weights that stay in float32"),
    Private(
        MODELING, "PreTrainedModel._keep_in_fp32_modules_strict", "weights that stay in float32"
    ),
    Private(MODELING, "PreTrainedModel._ep_plan", "experts dealt to ranks"),
    Private(
        "transformers.integrations.moe",
        "use_experts_implementation",
        "the activation of experts",
        "_apply_gate",
    ),
    Private(
        "transformers.integrations.hub_kernels",
        "is_torchdynamo_exporting",
        "keeps kernels of the hub from a probed model",
    ),
    Private("transformers.core_model_loading", "ConversionOps", "4 bits expanded while loading"),
    Private(
        "transformers.core_model_loading",
        "ErnieFuseAndSplitTextVisionExperts",
        "4 bits expanded before experts are divided",
    ),
    Private(
        "transformers.core_model_loading",
        "WeightConverter",
        "4 bits expanded while loading, before transformers 5.21",
        "_original_target_patterns",
    ),
    Private(MODELING, "PreTrainedModel._from_config", "small copies of a model for its check"),
    Private(
        "transformers.models.qwen3_next.modeling_qwen3_next",
        "torch_chunk_gated_delta_rule",
        "the gated delta rule where treegen's kernel does not run",
    ),
    Private("transformers.quantizers.base", "HfQuantizer", "MXFP4 that stays in 4 bits"),
    # Triton
    Private("triton.runtime", "driver", "shared memory of the device"),
    # TRL
    Private("trl", "GRPOTrainer._tokenize_prompts", "prompts of a rollout as token ids"),
    Private("trl", "GRPOTrainer", "the tokenizer of a rollout", "_tokenizer"),
    # lm-eval
    Private("lm_eval.tasks._index", "TaskIndex", "tasks in folders of YAML files"),
    Private("lm_eval.tasks._index", "Kind.GROUP", "tasks, groups and tags"),
    Private("lm_eval.tasks._yaml_loader", "load_yaml", "a definition without its functions"),
    Private("lm_eval.tasks", "TaskManager", "loads tasks by treegen's own index", "_index"),
    Private(
        "lm_eval.api.task", "ConfigurableTask", "filters of a task, to judge one sample", "_filters"
    ),
    Private("lm_eval.api.task", "get_metric", "refuses metrics of the working directory"),
    Private("lm_eval.api.registry", "metric_registry", "metrics that lm-eval brings"),
    Private("lm_eval.evaluator_utils", "_collect_groups_bottom_up", "scores of groups"),
    Private("lm_eval.models.utils", "handle_stop_sequences", "stop strings as `hf` reads them"),
    Private("lm_eval.models.utils", "normalize_gen_kwargs", "settings as `hf` reads them"),
    Private("lm_eval.models.utils", "has_bos_prefix", "one BOS token"),
    Private("lm_eval.models.utils", "postprocess_generated_text", "answers without thoughts"),
    Private("lm_eval.models.utils", "resolve_max_length", "the longest text, as `hf` has it"),
    Private("lm_eval.utils", "get_rolling_token_windows", "perplexity of long texts"),
    Private("lm_eval.utils", "make_disjoint_window", "perplexity of long texts"),
    # Inspect
    Private("inspect_ai._util.error", "PrerequisiteError", "errors that Inspect shows in a line"),
    Private(
        "inspect_ai.util._sandbox.registry",
        "registry_find_sandboxenv",
        "a provider of sandboxes by its name",
    ),
    Private("inspect_ai.model._cache", "epoch", "samples of one epoch differ from those of others"),
)
# On machines that have a GPU or these packages.
OPTIONAL = (
    Private("torch._C", "_cuda_endAllocateToPool", "ends the recording of a CUDA graph"),
    Private("flash_attn.flash_attn_interface", "_flash_attn_varlen_forward", "impl='flash'"),
    Private("xformers", "_has_cpp_library", "whether impl='xformers' has its kernels"),
)
# Names of the standard library, and attributes that treegen itself sets on others' objects.
OTHERS = {
    "os._exit",
    "threading._shutdown",
    "atexit._ncallbacks",
    "atexit._run_exitfuncs",
    "sys._base_executable",
    "task._log_destroy_pending",
    "part._is_expert_parallel",
    "Sizes._fields",
    "size._asdict",
    "tiles._replace",
}


def resolved(private: Private) -> Any:
    """Find what a line of the table names; raise AttributeError or ImportError if it is gone."""
    if private.module == "torch.ops.aten":
        found: Any = torch.ops.aten
    else:
        found = import_module(private.module)
    for name in private.path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("private", PRIVATE, ids=lambda p: f"{p.module}.{p.path}.{p.in_source}")
def test_a_private_interface_is_there(private: Private) -> None:
    package = private.module.partition(".")[0]
    pytest.importorskip(package)
    gone = (
        f"{private.module} has no {private.path} {private.in_source} any more, which treegen uses "
        f"for: {private.used_for}; adapt its use, or lower the bound of {package} in pyproject.toml"
    )
    try:
        found = resolved(private)
    except (AttributeError, ImportError) as error:
        raise AssertionError(gone) from error
    if private.in_source:
        bases = inspect.getmro(found) if isinstance(found, type) else (found,)
        own = [each for each in bases if each.__module__ != "builtins"]
        sources = [inspect.getsource(each) for each in own] + [
            inspect.getsource(inspect.getmodule(found) or found)
        ]
        assert any(private.in_source in source for source in sources), gone


@pytest.mark.parametrize("private", OPTIONAL, ids=lambda p: f"{p.module}.{p.path}")
def test_a_private_interface_of_an_optional_package_is_there(private: Private) -> None:
    package = private.module.partition(".")[0]
    if find_spec(package) is None or (package == "torch" and torch.version.cuda is None):
        pytest.skip(f"{package} has no such build here")
    assert resolved(private) is not None, private.used_for


def test_every_private_interface_that_is_used_is_in_the_table(repository: Path) -> None:
    """Names with an underscore that treegen does not define itself are somebody else's."""
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("treegen", "tasks", "cli")
        for path in (repository / folder).rglob("*.py")
        if "treegen/tasks" not in str(path) and "treegen/cli" not in str(path)
    }
    assert len(trees) > 300
    own = {name for tree in trees.values() for name in _defined(tree)}
    named = {
        part
        for each in (*PRIVATE, *OPTIONAL)
        for part in (*each.module.split("."), *each.path.split("."), each.in_source)
    }
    missing = {
        f"{path.relative_to(repository)}: {text}"
        for path, tree in trees.items()
        for name, text in _used(tree)
        if name not in named and name not in own and text not in OTHERS
    }
    assert not missing, "name these in PRIVATE, with what they are used for"


def _defined(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            found.add(node.attr)
    return found


def _used(tree: ast.AST) -> list[tuple[str, str]]:
    """List the private attributes and modules that a file uses, each with its text."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.append((node.attr, ast.unparse(node)))
        elif isinstance(node, ast.Import):
            found += [(part, a.name) for a in node.names for part in a.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("treegen"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [(name, f"{node.module}: {name}") for name in names]
    return [(n, text) for n, text in found if n.startswith("_") and not n.startswith("__")]
