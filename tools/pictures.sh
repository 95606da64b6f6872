#!/bin/sh
# Makes the pictures of README and docs from a real run on this machine: `make pictures` (about five minutes).
#
# Guarantees: every picture in docs/images/ comes from the commands below and from nothing else, one of them drawn from the
# kept cells of the study in docs/experiments/sharing. Needs Chromium for the
# pictures of the report; CHROMIUM names it.
set -eu
cd "$(dirname "$0")/.."
grapevine=.venv/bin/grapevine
run=pictures
images=docs/images
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

chromium=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
[ -n "$chromium" ] || { echo "pictures: Chromium is needed for the report's pictures; name it with CHROMIUM=/path" >&2; exit 1; }
mkdir -p "$images"

# A page of the given width and height as a PNG. Chromium's window has a least width, so narrow pages lie in a frame.
shot() {
    printf '<body style="margin:0"><iframe src="file://%s" style="border:0;width:%spx;height:%spx"></iframe>' "$1" "$2" "$3" \
        >"$scratch/frame.html"
    "$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files \
        --force-device-scale-factor="${5:-1}" --window-size="$2,$3" --virtual-time-budget=3000 \
        --screenshot="$4" "file://$scratch/frame.html" >"$scratch/chromium.log" 2>&1 ||
        { cat "$scratch/chromium.log" >&2; exit 1; }
}

# --- The live screen, once the slowest node is at two thirds.
$grapevine up configs/demo.yaml --fresh --set run=$run >"$scratch/up.log" 2>&1 &
up=$!
until $grapevine status $run --json 2>/dev/null |
    .venv/bin/python -c 'import json, sys; sys.exit((json.load(sys.stdin)["round"] or 0) < 100)' 2>/dev/null; do
    kill -0 $up 2>/dev/null || { cat "$scratch/up.log" >&2; exit 1; }
    sleep 1
done
$grapevine status $run --svg "$images/live-screen.svg"
wait $up

# --- The report, wide and narrow.
$grapevine report $run --out "$scratch/report.html" >/dev/null
shot "$scratch/report.html" 1180 1500 "$images/report.png"
shot "$scratch/report.html" 390 1500 "$images/report-narrow.png"
# --- Swarm against silo, from the study's cells.
.venv/bin/python tools/swarm_or_silo.py
echo "wrote $(ls $images | tr '\n' ' ')to $images"
