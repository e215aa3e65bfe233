#!/usr/bin/env bash
# `vllm serve` under Nsight Systems, with the plugin on, and the breakdown at the end. See README.md, "nsys.sh".
set -euo pipefail

readonly MINIMUM_NSYS=2023.1
readonly SESSION="vllm-k25-$$"

usage() {
  cat <<'END'
usage: nsys.sh [options] -- MODEL [arguments of `vllm serve`]

Starts the server under nsys, waits until it answers, records while it is under load, stops the recording, then the
server, and runs `vllm-k25 analyze` on the report.

  --out DIR             where the report, the log and the breakdown go (default: nsys-out)
  --load COMMAND        shell command that puts load on the server; recorded until it ends
  --seconds N           without --load: record for N seconds after the server answers (default: 30)
  --ready-seconds N     how long the server may take to start (default: 3600)
  --stop-seconds N      how long the server, and then nsys, may take to end (default: 600)
  --min-free-gib N      free space that DIR must have (default: 20)
  --nsys-option OPTION  one more option for `nsys profile`, such as --trace=cuda-sw,nvtx; repeatable
  --dry-run             print the commands and what is missing; start nothing

The recording begins with the server: replayed kernels are named by where their graph was captured, and that is at the
start. Keep the load short instead. K25_* variables of the environment apply; K25_GRAPHS is `inplace` and
K25_SAMPLE_EVERY 1 unless they say otherwise.

Exit codes: that of `vllm-k25 analyze` (0 complete, 3 incomplete); 1 the server, the load or the recording failed;
2 wrong usage, or something is missing; 130 interrupted (what was recorded is analysed all the same).
END
}

say() { printf 'nsys.sh: %s\n' "$*" >&2; }

refuse() {
  say "$*"
  exit 2
}

# --- arguments -------------------------------------------------------------------------------------------

out=nsys-out load='' seconds=30 ready_seconds=3600 stop_seconds=600 min_free_gib=20 dry_run=0
nsys_options=()

is_number() { [[ $1 =~ ^[0-9]+$ ]]; }

while (($#)); do
  case $1 in
    --out | --load | --seconds | --ready-seconds | --stop-seconds | --min-free-gib | --nsys-option)
      (($# > 1)) || refuse "$1 needs a value (--help shows the usage)"
      case $1 in
        --out) out=$2 ;;
        --load) load=$2 ;;
        --nsys-option) nsys_options+=("$2") ;;
        *)
          is_number "$2" || refuse "$1 $2: must be a whole number"
          case $1 in
            --seconds) seconds=$2 ;;
            --ready-seconds) ready_seconds=$2 ;;
            --stop-seconds) stop_seconds=$2 ;;
            --min-free-gib) min_free_gib=$2 ;;
          esac
          ;;
      esac
      shift 2
      ;;
    --dry-run)
      dry_run=1
      shift
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *) refuse "$1: not an option; the arguments of \`vllm serve\` come after -- (--help shows the usage)" ;;
  esac
done
(($#)) || refuse "no model: nsys.sh [options] -- MODEL [arguments of \`vllm serve\`]"
serve=("$@")

for option in ${nsys_options[@]+"${nsys_options[@]}"}; do
  case $option in
    --capture-range* | -c | -c?* | --delay* | -y | --duration* | -d | --start-later* | --cuda-graph-trace* | --session*)
      refuse "$option: the recording has to contain the capture of the graphs, node by node; use --seconds or --load" ;;
    --output* | -o) refuse "$option: use --out" ;;
    --kill* | --wait* | -w) refuse "$option: nsys.sh ends the server itself, after the report is written" ;;
  esac
done

# The value of a `vllm serve` option, given as `--name value` or `--name=value`; $2 where it is absent.
serve_option() {
  local name=$1 value=$2 i
  for ((i = 0; i < ${#serve[@]}; i++)); do
    case ${serve[i]} in
      "$name") value=${serve[i + 1]:-} ;;
      "$name="*) value=${serve[i]#*=} ;;
    esac
  done
  printf '%s' "$value"
}

has_option() {
  local argument
  for argument in "${serve[@]}"; do
    case $argument in "$1" | "$1="* | "$1."*) return 0 ;; esac
  done
  return 1
}

port=$(serve_option --port 8000)
host=$(serve_option --host 127.0.0.1)
case $host in 0.0.0.0 | :: | '') host=127.0.0.1 ;; esac

# --- what has to be there --------------------------------------------------------------------------------

# 2024.5 is at least 2023.1.
at_least() { [[ $(printf '%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

nsys_version() {
  local text
  text=$(nsys --version 2>/dev/null) || return 0
  [[ $text =~ ([0-9]{4}\.[0-9]+) ]] && printf '%s' "${BASH_REMATCH[1]}"
  return 0
}

# `nsys profile --help` names the option. Not through a pipe: grep -q would end nsys early, and pipefail with it.
nsys_knows() { [[ ${nsys_help=$(nsys profile --help 2>/dev/null || :)} == *"$1"* ]]; }

answers_at() { (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null; }

problems=()
check() {
  local version free
  if ! command -v nsys >/dev/null; then
    problems+=("nsys is not on PATH: install Nsight Systems $MINIMUM_NSYS or newer")
  else
    version=$(nsys_version)
    if [[ -z $version ]]; then
      problems+=("nsys --version gives no version")
    elif ! at_least "$version" "$MINIMUM_NSYS"; then
      problems+=("nsys is $version, and $MINIMUM_NSYS or newer is needed")
    fi
    for option in --cuda-graph-trace --trace-fork-before-exec --session-new; do
      nsys_knows "$option" || problems+=("this nsys has no option $option")
    done
  fi
  command -v vllm >/dev/null || problems+=("vllm is not on PATH: activate the environment that it is in")
  command -v vllm-k25 >/dev/null ||
    problems+=("vllm-k25 is not on PATH: pip install vllm-k25-instrument into vLLM's environment")

  # One tool at a time: a second one that CUPTI calls back gets nothing, or takes it from the first.
  local variable
  for variable in NSYS_PROFILING_SESSION_ID CUDA_INJECTION64_PATH NVTX_INJECTION64_PATH; do
    [[ -z ${!variable:-} ]] || problems+=("$variable is set: another profiler is attached already")
  done
  ! has_option --profiler-config ||
    problems+=("--profiler-config: vLLM's own profiler would take CUPTI from nsys; leave it out")
  if has_option --distributed-executor-backend && [[ $(serve_option --distributed-executor-backend '') == ray ]]; then
    problems+=("Ray starts the workers, outside of nsys: leave --distributed-executor-backend ray out" \
      "(several nodes: vLLM's --ray-workers-use-nsight)")
  fi
  ! has_option --uds || problems+=("--uds: nsys.sh asks the server's port whether it is ready; leave it out")
  case ,${VLLM_PLUGINS-vllm_k25_instrument}, in
    *,vllm_k25_instrument,*) ;;
    *) problems+=("VLLM_PLUGINS leaves the plugin out: add vllm_k25_instrument to it") ;;
  esac
  is_number "$port" || problems+=("--port $port: not a number")
  ! answers_at || problems+=("something listens on $host:$port already: name another --port")

  if [[ -e $out/report.nsys-rep ]]; then
    problems+=("$out/report.nsys-rep is there already: name another --out")
  fi
  local folder=$out
  while [[ ! -d $folder && $folder == */* && -n ${folder%/*} ]]; do folder=${folder%/*}; done
  [[ -d $folder ]] || folder=.
  if [[ ! -w $folder ]]; then
    problems+=("$folder cannot be written")
  else
    free=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1048576) }')
    ((free >= min_free_gib)) || problems+=("$folder has $free GiB free, and --min-free-gib asks for $min_free_gib")
  fi

  if has_option --enforce-eager; then
    say "note: --enforce-eager: no graphs, which is not how the server runs otherwise"
  fi
  case ${VLLM_WORKER_MULTIPROC_METHOD:-spawn} in
    spawn) ;;
    *) say "note: VLLM_WORKER_MULTIPROC_METHOD=$VLLM_WORKER_MULTIPROC_METHOD becomes spawn" ;;
  esac
  command -v nvidia-smi >/dev/null || say "note: no nvidia-smi here; is there a GPU?"
}
check

# --- the commands ----------------------------------------------------------------------------------------

report=$out/report.nsys-rep
environment=(
  K25_INSTRUMENT=1
  K25_NVTX=1
  "K25_GRAPHS=${K25_GRAPHS:-inplace}"
  "K25_SAMPLE_EVERY=${K25_SAMPLE_EVERY:-1}"
  # nsys traces a forked process badly: it holds the locks of threads that are not there.
  VLLM_WORKER_MULTIPROC_METHOD=spawn
  # vLLM kills workers that take longer than 5 s to end, and what they have not handed to nsys by then is lost.
  "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=${VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS:-120}"
)
# Put in the background by a script, a shell has SIGINT ignored, and cannot change that for what it starts; env can
# (coreutils 8.31 or newer).
if [[ -n $(trap -p INT) ]] && env --default-signal=INT true 2>/dev/null; then
  environment=(--default-signal=INT "${environment[@]}")
fi
profile=(
  nsys profile
  "--session-new=$SESSION"
  "--output=$out/report"
  '--trace=cuda,nvtx'
  # At the level of graphs a replay is one opaque bar.
  --cuda-graph-trace=node
  --trace-fork-before-exec=true
  # Neither is needed, and both cost time on every core.
  --sample=none
  --cpuctxsw=none
  # The end of the recording is not the end of the server: nsys.sh stops it, gently.
  --kill=none
  --wait=primary
)
# Device-side tracing of event records costs GPU time, and graphs that the plugin times are full of them.
if command -v nsys >/dev/null && nsys_knows --cuda-event-trace; then profile+=(--cuda-event-trace=false); fi
# nsys takes no option twice: the caller's takes the place of ours.
for option in ${nsys_options[@]+"${nsys_options[@]}"}; do
  for i in "${!profile[@]}"; do
    if [[ ${profile[i]%%=*} == "${option%%=*}" ]]; then unset 'profile[i]'; fi
  done
  profile+=("$option")
done
# A shell that writes down its number and becomes vLLM: signals must go to vLLM, and to nsys none.
# shellcheck disable=SC2016
as_pid=(bash -c 'echo "$$" >"$1"; shift; exec "$@"' nsys.sh "$out/vllm.pid")
stop=(nsys stop "--session=$SESSION")
analyse=(vllm-k25 analyze "$report" --json "$out/breakdown.json" --html "$out/breakdown.html")

show() {
  local word line=''
  for word in "$@"; do line+=$(printf '%q ' "$word"); done
  printf '%s\n' "${line% }"
}

if ((dry_run)); then
  show env "${environment[@]}" "${profile[@]}" "${as_pid[@]}" vllm serve "${serve[@]}"
  if [[ -n $load ]]; then show bash -c "$load"; else show sleep "$seconds"; fi
  show "${stop[@]}"
  # shellcheck disable=SC2016
  printf 'kill -INT "$(cat %q)"\n' "$out/vllm.pid"
  show "${analyse[@]}"
  for problem in ${problems[@]+"${problems[@]}"}; do say "missing: $problem"; done
  exit 0
fi
if ((${#problems[@]})); then
  for problem in "${problems[@]}"; do say "$problem"; done
  exit 2
fi

# --- run -------------------------------------------------------------------------------------------------

mkdir -p "$out"
rm -f "$out/vllm.pid"
failed=0 interrupted=0 nsys_pid='' vllm_pid=''

# A process that nobody has waited for is a zombie, and over.
runs() {
  local stat=''
  [[ -n $1 ]] || return 1
  # Not $(<file): where there is no such file, that ends the script, whatever follows.
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  stat=${stat##*) }
  [[ ${stat%% *} != [ZX] ]]
}

# Whether the process is over within so many seconds.
over_within() {
  local deadline=$((SECONDS + $2))
  while runs "$1"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.2
  done
}

# Sets vllm_pid as soon as the server's process has written it down.
know_vllm() { [[ -n $vllm_pid || ! -s $out/vllm.pid ]] || vllm_pid=$(<"$out/vllm.pid"); }

stop_all() {
  trap '' INT TERM
  # It may be too early for that: nsys takes a while to start a program.
  local deadline=$((SECONDS + 30))
  while know_vllm; [[ -z $vllm_pid ]] && runs "$nsys_pid" && ((SECONDS < deadline)); do sleep 0.2; done
  # The recording first, while the workers live: what they hold is handed over, and the report written.
  if runs "$nsys_pid"; then
    say "stopping the recording"
    if ! "${stop[@]}" >>"$out/server.log" 2>&1; then
      say "\`nsys stop\` failed; the report will be written when the server ends"
    fi
  fi
  if runs "$vllm_pid"; then
    say "stopping the server (SIGINT to $vllm_pid)"
    kill -INT "$vllm_pid" 2>/dev/null || :
    if ! over_within "$vllm_pid" "$stop_seconds"; then
      say "the server did not end within $stop_seconds s of SIGINT: TERM, then KILL"
      failed=1
      kill -TERM "$vllm_pid" 2>/dev/null || :
      over_within "$vllm_pid" 30 || kill -KILL "$vllm_pid" 2>/dev/null || :
    fi
  fi
  # Without a server to wait for there is nothing that nsys could still be waiting for.
  if ! over_within "$nsys_pid" "$([[ -n $vllm_pid ]] && printf '%s' "$stop_seconds" || printf 5)"; then
    say "nsys did not end: TERM"
    failed=1
    kill -TERM "$nsys_pid" 2>/dev/null || :
  fi
  wait "$nsys_pid" 2>/dev/null || :
}

# Job control gives the job a process group of its own, so that Ctrl-C reaches this script alone; and without it a
# shell starts background jobs with SIGINT ignored, which vLLM would inherit.
set -m
env "${environment[@]}" "${profile[@]}" "${as_pid[@]}" vllm serve "${serve[@]}" \
  </dev/null >"$out/server.log" 2>&1 &
nsys_pid=$!
set +m
trap 'interrupted=1' INT TERM
say "server log: $out/server.log"

healthy() {
  local status=''
  { exec 3<>"/dev/tcp/$host/$port"; } 2>/dev/null || return 1
  printf 'GET /health HTTP/1.0\r\nHost: %s\r\n\r\n' "$host" >&3 2>/dev/null || :
  read -r -t 5 status <&3 || :
  exec 3>&-
  [[ $status == *" 200 "* ]]
}

deadline=$((SECONDS + ready_seconds))
until ((interrupted)) || healthy; do
  know_vllm
  if ! runs "$nsys_pid" || { [[ -n $vllm_pid ]] && ! runs "$vllm_pid"; }; then
    say "the server ended before it answered; the end of its log:"
    failed=1
  elif ((SECONDS >= deadline)); then
    say "the server did not answer within $ready_seconds s; the end of its log:"
    failed=1
  fi
  if ((failed)); then
    tail -n 20 "$out/server.log" >&2
    stop_all
    exit 1
  fi
  sleep 0.5 &
  wait $! || :
done
know_vllm

if ((!interrupted)); then
  if [[ -n $load ]]; then
    say "the server answers; recording until the load ends"
    set -m
    bash -c "$load" </dev/null &
    set +m
  else
    say "the server answers; recording for $seconds s"
    sleep "$seconds" &
  fi
  load_pid=$! load_status=0
  wait "$load_pid" || load_status=$?
  if ((interrupted)); then
    # The load has a process group of its own; a plain sleep has not.
    kill -TERM -- "-$load_pid" 2>/dev/null || kill -TERM "$load_pid" 2>/dev/null || :
  elif ((load_status)); then
    say "the load failed (exit status $load_status)"
    failed=1
  fi
  if ! runs "$vllm_pid"; then
    say "the server ended under load; see $out/server.log"
    failed=1
  fi
fi
((!interrupted)) || say "interrupted; what was recorded so far will be analysed"
stop_all

if [[ ! -s $report ]]; then
  say "nsys wrote no report; see $out/server.log"
  ((!interrupted)) || exit 130
  exit 1
fi
status=0
"${analyse[@]}" || status=$?
say "report $report, breakdown $out/breakdown.json and .html"
((!interrupted)) || exit 130
((!failed)) || exit 1
exit "$status"
