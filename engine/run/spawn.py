"""How a worker process is started: its argv and its environment. No torch is imported to build them.

The working directory is never on the import path (`-P`, PYTHONSAFEPATH), compiler caches are private, idle threads
sleep. More than one device goes through torchrun on the loopback interface, one worker file for all ranks.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.caches import compiled
from engine.errors import WorkbenchError, visible, without_secrets
from engine.run.devices import Choice, cores
from engine.run.inside import READ_WITHIN
from engine.run.store import RunFolder

TOKEN = "WORKBENCH_RUN_TOKEN"
ALL_CARDS = "WORKBENCH_ALL_CARDS"
"""What CUDA_VISIBLE_DEVICES was where the run was launched, empty where it was not set: a worker sees its own GPUs alone."""
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
_AWS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
_AZURE = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
)
STORE_KEYS = {
    "s3fs": _AWS,
    "gcsfs": ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE"),
    "adlfs": _AZURE,
    "ocifs": (),
    "huggingface_hub": HUB_TOKENS,
    "aiohttp": (),
}
"""The variables in which the package of an object store looks for keys, by that package."""
ALL_TOKENS = tuple(dict.fromkeys((*HUB_TOKENS, *(name for names in STORE_KEYS.values() for name in names))))
WANDB_KEY, COMET_KEY = "WANDB_API_KEY", "COMET_API_KEY"
MLFLOW_LOGIN = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
NO_HUB_TOKEN = "HF_HUB_DISABLE_IMPLICIT_TOKEN"
"""The hub's client then takes no token from the file that a login leaves either."""
FOR_REWARDS = "WORKBENCH_REWARD_SECRETS"
"""Names of variables, with commas between, that reward functions may see though they hold secrets, such as a judge's key."""
_SECRET_NAME = re.compile(
    r"(?i)(^|_)(tokens?|secrets?|passw(or)?d|passphrase|credentials?|pat|apikey|key(_id)?|auth)($|_)"
)

TORCHRUN = ("-m", "engine.compat.torchrun", "--rdzv-backend=one-address", "--max-restarts=0")
"""torchrun, listening at the address of its rendezvous and nowhere else."""


@dataclass(frozen=True)
class Group:
    """A node's place among those of a run: torchrun's node rank, how many there are, the address of the first (host:port) and
    the network interface that leads there, empty where that is not known."""

    rank: int
    nodes: int
    endpoint: str
    interface: str = ""
    timeout: int = 60


def python() -> list[str]:
    return [sys.executable, "-P", "-u"]


def worker_argv(
    folder: RunFolder, choice: Choice, module: str = "engine.worker", group: Group | None = None
) -> list[str]:
    """One process directly; several through torchrun, which picks a free port on the loopback interface itself. Nodes meet
    at the address of their group, and rank 0 is on the first."""
    if group is not None:
        return [
            *python(),
            *TORCHRUN,
            f"--nnodes={group.nodes}",
            f"--nproc-per-node={choice.processes}",
            f"--rdzv-endpoint={group.endpoint}",
            f"--rdzv-conf=rank={group.rank},timeout={group.timeout}",
            "-m",
            module,
            str(folder.path),
        ]
    if choice.processes == 1:
        return [*python(), "-m", module, str(folder.path)]
    return [
        *python(),
        *TORCHRUN,
        "--nnodes=1",
        f"--nproc-per-node={choice.processes}",
        "--rdzv-endpoint=127.0.0.1:0",
        "-m",
        module,
        str(folder.path),
    ]


def environment(
    base: Mapping[str, str],
    choice: Choice,
    token: str,
    secret_names: Collection[str] = HUB_TOKENS,
    group: Group | None = None,
) -> dict[str, str]:
    """The worker's environment: the window's own, made safe, and of its secrets those alone that are named."""
    values = {**without_tokens(base, (*secret_names, *for_rewards(base))), **safe_python(base)}
    values |= {
        TOKEN: token,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": base.get("TOKENIZERS_PARALLELISM", "false"),
        "CUDA_VISIBLE_DEVICES": ",".join(choice.visible),
        ALL_CARDS: base.get("CUDA_VISIBLE_DEVICES", ""),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    values.setdefault("OMP_NUM_THREADS", str(threads(choice)))
    for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        if name not in base:
            values[name] = str(_for_compiled(folder, base))
    if group is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if group.interface:
                values.setdefault(name, group.interface)
    elif choice.processes > 1:
        values |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if choice.processes > 1 or group is not None:
        # torch notes the last collectives, gloo's too, so that one that hangs can be named (engine.compat.flight_recorder).
        values.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    # These describe the launching window's own rank, terminal or bounds, not the worker's.
    for name in (READ_WITHIN, "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS", "LINES"):
        values.pop(name, None)
    return values


def other_card(number: int, base: Mapping[str, str]) -> str:
    """What CUDA_VISIBLE_DEVICES is to be for the GPU of this number, counted as where the run of this environment was launched;
    empty where there are not so many."""
    allowed = [name.strip() for name in base.get(ALL_CARDS, "").split(",") if name.strip()]
    return str(number) if not allowed else allowed[number] if number < len(allowed) else ""


def without_tokens(base: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """The environment without variables that hold secrets, by their name or their value, but for those to keep.

    Credentials of a proxy stay where the hub or a store is asked, which is reached through it.
    """
    hub, fetches = (any(name in keep for name in names) for names in (HUB_TOKENS, ALL_TOKENS))
    values = {
        name: value
        for name, value in base.items()
        if name in keep
        or name == FOR_REWARDS
        or (fetches and name.lower().endswith("_proxy"))
        or not (_SECRET_NAME.search(name) or without_secrets(value) != value)
    }
    return values if hub else {**values, NO_HUB_TOKEN: "1"}


def for_rewards(base: Mapping[str, str]) -> tuple[str, ...]:
    """The variables with secrets that the person lets reward functions see."""
    return tuple(name.strip() for name in base.get(FOR_REWARDS, "").split(",") if name.strip())


def forget_tokens() -> None:
    """Takes the tokens of the hub and of object stores out of this process's environment, once all that comes from there is
    here."""
    for name in ALL_TOKENS:
        os.environ.pop(name, None)
    os.environ[NO_HUB_TOKEN] = "1"


def safe_python(base: Mapping[str, str]) -> dict[str, str]:
    """What keeps a folder named `engine` or a file `torch.py` of the user from being imported."""
    values = {"PYTHONSAFEPATH": "1"}
    root = Path(__file__).resolve().parents[2]
    parts = [part for part in base.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(part)]
    if (root / "pyproject.toml").is_file() and str(root) not in parts:
        # Run from a checkout that may not be installed: the child must find the very same code.
        parts.insert(0, str(root))
    if parts or "PYTHONPATH" in base:
        values["PYTHONPATH"] = os.pathsep.join(parts)
    return values


def threads(choice: Choice) -> int:
    share = max(1, cores() // choice.processes)
    return min(share, 8) if choice.visible else share


def _for_compiled(what: str, base: Mapping[str, str]) -> Path:
    """The folder for compiled code, made. Raises WorkbenchError where it cannot be."""
    place = compiled(what, base)
    try:
        return private_folder(place)
    except OSError as problem:
        named = "WORKBENCH_CACHE" if base.get("WORKBENCH_CACHE") else visible(str(place))
        raise WorkbenchError(
            f"{named}: compiled kernels cannot be kept in {visible(str(place))}: {problem.strerror or problem}.",
            "Set WORKBENCH_CACHE to a folder that may be written.",
        ) from problem


def private_folder(path: Path) -> Path:
    """The folder, made 0700. Raises WorkbenchError if it is another's, or others can write into it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise WorkbenchError(f"{visible(str(path))}: belongs to another user or is a link; remove it.")
    if info.st_mode & 0o077:
        path.chmod(0o700)
    return path
