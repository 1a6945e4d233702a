#!/bin/sh
# Builds llama.cpp for this box and measures what it takes: sh run.sh [--help]. Needs Python, a C++ compiler and, for a card, a CUDA
# toolkit; no network. This part finds a Python that the bundle has wheels for, measure.py does the rest.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1
versions=$(sed -n '/"pythons"/,/]/s/^.*"\(3\.[0-9]*\)".*$/\1/p' "$here/manifest.json" | tr '\n' ' ')
for version in $versions; do
    for name in "python$version" python3 python; do
        if [ "$("$name" -c 'import lzma, sys, zlib; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; then
            exec "$name" -I "$here/measure.py" "$@"
        fi
    done
done
echo "error: this bundle is for Python ${versions% }, and $(python3 --version 2>&1 || echo 'no python3') is here" >&2
python3 - >&2 2>/dev/null <<'EOF' || echo "try: install Python ${versions% }" >&2
import sys
assert sys.version_info >= (3, 11)
print("try: where it was made, llmctl pack DIR --python %d.%d" % sys.version_info[:2])
EOF
exit 2
