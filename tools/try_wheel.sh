#!/bin/sh
# Installs a wheel without extras into an empty environment and uses it outside the checkout: help, a plan, an answer.
#   sh tools/try_wheel.sh dist/trencadis-*.whl
set -eu
tools=$(cd "$(dirname "$0")" && pwd)
wheel=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PY:-python3}" -m venv env
sh "$tools/install_torch.sh" env/bin/python
env/bin/python -m pip install -q --disable-pip-version-check "$wheel"
env/bin/trencadis serve --help >/dev/null
env/bin/trencadis plan --device cpu --memory 4GiB
env/bin/python -P - <<'EOF'
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path

llm = LLM(str(demo_path()), dtype="float32")
chat = [{"role": "user", "content": [
    {"type": "image", "image": str(demo_path().with_name("demo_picture.png"))},
    {"type": "text", "text": "What is in the picture?"},
]}]
text = llm.chat(chat, SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text
assert "circle" in text and "square" in text and "triangle" in text, text
print(text)
EOF
