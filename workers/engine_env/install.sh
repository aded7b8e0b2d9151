#!/usr/bin/env bash
# Build in DIR the environment of the CPU engine: a real SGLang 0.5.20 that needs neither CUDA nor AMX (x86-64 with
# AVX2; Python 3.11 or 3.12). About 70 s and 2.8 GB. For GPUs install sglang as its own guide says, in an environment
# of its own, and name its interpreter in engine.python.
#
#   install.sh DIR          the interpreter is $PYTHON, or python3
#
# DIR appears only when everything is in place: it is built beside itself and renamed at the end. Programs in DIR/bin
# other than the interpreter keep the first name in their first line; start them as DIR/bin/python -m NAME.
#
# A plain `pip install sglang` does not give a CPU server:
# - its requirements pull gigabytes of CUDA packages: it goes in with --no-deps, beside what it imports;
# - torchvision's wheels expect the operators of a CUDA library at import, and what reads images for a Qwen-VL those of
#   sgl_kernel: declarations are enough, none is called;
# - sgl_kernel has no CPU wheel: without AMX a dense model calls nothing in it, so a module whose functions raise does.
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: install.sh DIR" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
target=$(realpath -m "$1")
python=${PYTHON:-python3}

if [ -e "$target" ] && [ ! -e "$target/pyvenv.cfg" ]; then
    echo "$target is there and is no environment: name another folder, or remove it" >&2
    exit 2
fi
if [ "$(uname -m)" != x86_64 ]; then
    echo "the CPU engine was built for x86-64 only; this is $(uname -m): set engine.url or engine.python instead" >&2
    exit 2
fi

build="$target.building"
rm -rf "$build"
trap 'rm -rf "$build"' EXIT
trap 'exit 130' INT TERM HUP

"$python" -m venv "$build"
pip=("$build/bin/python" -m pip install -qq --disable-pip-version-check)
echo "1 of 3: what SGLang imports (2 GB, most of the time)"
"${pip[@]}" -r "$here/requirements.txt"
echo "2 of 3: SGLang"
"${pip[@]}" --no-deps sglang==0.5.20 torchvision==0.28.0

echo "3 of 3: stand-ins for CUDA, and a look at whether it can be imported"
site=$("$build/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cat > "$site/penstock_torchvision_ops.py" <<'PY'
"""Declares the operators that torchvision, and SGLang's file of Qwen3.5, look for at import."""
import torch

for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
# Whatever reads images for a Qwen-VL imports that file, and calls none of them for a Qwen2-VL.
for _name in ("fused_sigmoid_mul", "fused_qk_gemma_rmsnorm", "fused_qk_gemma_rmsnorm_with_gate",
              "fused_qkvzba_split_reshape_cat_contiguous"):
    torch.library.define(f"sgl_kernel::{_name}_cpu", "(Tensor x, Tensor y) -> Tensor")
PY
echo "import penstock_torchvision_ops" > "$site/penstock_torchvision_ops.pth"
mkdir -p "$site/sgl_kernel"
cat > "$site/sgl_kernel/__init__.py" <<'PY'
"""Stands where the CUDA kernels would be: every name is there, every call raises."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not built for this CPU")

    return absent
PY

SGLANG_USE_CPU_ENGINE=1 "$build/bin/python" -c 'import sglang.launch_server'
rm -rf "$target"
mv "$build" "$target"
# A virtual environment finds itself by pyvenv.cfg beside bin/, so the renamed one works through its interpreter.
"$target/bin/python" -c 'import sglang; print("sglang", sglang.__version__)'
