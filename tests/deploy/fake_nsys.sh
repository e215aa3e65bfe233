#!/usr/bin/env bash
# Stands for nsys: says what it was asked, runs the program, and writes the report when it is told to stop.
set -euo pipefail
log() { printf '%s\n' "$*" >>"$FAKE_LOG"; }

case $1 in
  --version)
    echo "NVIDIA Nsight Systems version ${FAKE_NSYS_VERSION:-2025.6.3.541-256337736014v0}"
    ;;
  profile)
    if [[ $2 == --help ]]; then
      # As long as the real one's, which is more than a pipe holds.
      for ((i = 0; i < 3000; i++)); do echo "    --some-other-option=<what it is for>"; done
      known='--cuda-graph-trace --trace-fork-before-exec --session-new --cuda-event-trace'
      read -ra options <<<"${FAKE_NSYS_OPTIONS-$known}"
      printf '    %s=\n' "${options[@]}"
      for ((i = 0; i < 3000; i++)); do echo "    --yet-another-option=<what it is for>"; done
      exit 0
    fi
    shift
    log "profile $*"
    while [[ $1 == --* ]]; do
      case $1 in --output=*) report=${1#*=}.nsys-rep ;; esac
      shift
    done
    trap 'log "nsys got SIGINT"' INT
    # As a job of its own: without job control the program would start with SIGINT ignored.
    set -m
    "$@" &
    child=$!
    wait "$child" || :
    if [[ ! -e $report && -z ${FAKE_NO_REPORT:-} ]]; then
      echo recorded >"$report"
      log "report written at the end"
    fi
    log "nsys ended"
    ;;
  stop)
    if [[ -n ${FAKE_STOP_FAILS:-} ]]; then exit 1; fi
    [[ -n ${FAKE_NO_REPORT:-} ]] || echo recorded >"$FAKE_OUT/report.nsys-rep"
    log "stop $2, the server $(kill -0 "$(<"$FAKE_OUT/vllm.pid")" 2>/dev/null && echo lives || echo is gone)"
    ;;
esac
