#!/usr/bin/env bash
# Sets up a node of a cluster and starts Ray on it, with MLflow on the head and the watcher of spot notices on workers.
#   start-node.sh install                                   installs the pins with the submitter's version of Python
#   start-node.sh head|worker [options of `ray start`]      cluster.yaml and its variants call it after `ray stop`
#   start-node.sh stop                                      on the head, before `ray down`
# MLFLOW_BACKEND and MLFLOW_ARTIFACTS say where MLflow stores runs and files. Without MLFLOW_BACKEND, runs are in a local file
# that is copied to the bucket. HEAD_IDLE_HOURS ends the machine: the head's after so many hours without a job, a worker's after so
# many hours without a head.
set -euo pipefail
role=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
logs=$HOME/logs
mkdir -p "$logs"
ulimit -n 65536 || true
database=$HOME/mlflow/mlflow.db

if [ "$role" = install ]; then
  python=python$(sed -nE 's/^version(_info)? *= *([0-9]+\.[0-9]+).*/\2/p' "$here/pyvenv.cfg")
  export PATH=$HOME/.local/bin:$PATH
  if [ ! -e "$here/.venv" ] && ! command -v "$python" > /dev/null; then
    command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/0.13.9/install.sh | sh
    uv venv --seed --python "${python#python}" "$here/.venv"
  fi
  make -s -C "$here" .venv/.cloud PYTHON="$python"
  grep -qs rlhf/.venv ~/.bashrc || echo 'export PATH=$HOME/rlhf/.venv/bin:$PATH' >> ~/.bashrc   # for `ray down` and `make status`
  exit 0
fi

if [ "$role" = stop ]; then   # stops MLflow, and saves its last state
  if [ -e "$HOME/mlflow/pid" ]; then kill -- "-$(cat "$HOME/mlflow/pid")" || true; fi
  if [ -e "$HOME/mlflow/kept_at" ]; then python "$here/keep.py" keep "$database" "$(cat "$HOME/mlflow/kept_at")"; fi
  rm -f "$HOME/mlflow/pid"
  exit 0
fi

needed() {   # a worker is needed while its head listens, a head while a job runs, or while Ray lives and does not tell
  if [ -n "${RAY_HEAD_IP:-}" ]; then timeout 10 bash -c "< /dev/tcp/$RAY_HEAD_IP/6379" 2> /dev/null; return; fi
  local jobs token
  token=$(cat "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}")
  if jobs=$(curl -sf -m 60 -H "Authorization: Bearer $token" http://127.0.0.1:8265/api/jobs/); then
    grep -qE '"status": *"(PENDING|RUNNING)"' <<< "$jobs"
  else
    pgrep -x raylet > /dev/null
  fi
}

if [ "$role" = idle ]; then   # ends this machine after $1 hours in which it was not needed
  seconds=$(python -c "print(int(float('$1') * 3600))") since=$SECONDS
  while (( SECONDS - since < seconds )); do
    sleep $(( seconds < 600 ? 1 : 60 ))
    if needed; then since=$SECONDS; fi
  done
  bash "$here/start-node.sh" stop
  sudo shutdown -h now
  exit 0
fi

# One secret for Ray and MLflow: the token from file_mounts.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(cat "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}")
chmod 600 "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" || true   # a bind mount may belong to another user

# Ray's address and its interface. By default, Gloo uses the interface of the host name, which is loopback on many machines;
# then workers on two nodes cannot connect.
read -r node_ip interface < <(python -c "
import psutil, ray
ip = ray.util.get_node_ip_address()
print(ip, next(name for name, has in psutil.net_if_addrs().items() if ip in [one.address for one in has]))")
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}

# torch is built for CUDA 13. With an older driver, Ray would see the GPU, and torch none.
driver=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true)
if [ -n "$driver" ] && [ "${driver%%.*}" -lt 580 ]; then
  echo "NVIDIA's driver is $driver, and torch needs 580 or newer; install that, or use a newer machine image" >&2
  exit 1
fi

# Ray labels both sizes of the A100 as A100, but jobs select by size. A label set in the cluster file stays.
gpu=$(nvidia-smi --id=0 --query-gpu=name --format=csv,noheader 2>/dev/null || true)
if [[ $gpu =~ A100.*(40|80)GB ]]; then
  export RAY_OVERRIDE_LABELS=${RAY_OVERRIDE_LABELS:-"{\"ray.io/accelerator-type\": \"A100-${BASH_REMATCH[1]}G\"}"}
fi

# Jobs inherit these from Ray, so that no user has to set MLflow's address or password.
head_ip=${RAY_HEAD_IP:-$node_ip}
export MLFLOW_TRACKING_URI=http://$head_ip:5000 MLFLOW_TRACKING_USERNAME=admin MLFLOW_TRACKING_PASSWORD=$RAY_AUTH_TOKEN
export RAY_USAGE_STATS_ENABLED=0 MLFLOW_DISABLE_TELEMETRY=true

if [ -n "${HEAD_IDLE_HOURS:-}" ]; then
  setsid nohup flock -n "$logs/idle.lock" bash "$here/start-node.sh" idle "$HEAD_IDLE_HOURS" >> "$logs/idle.log" 2>&1 < /dev/null &
fi
if [ "$role" = head ]; then
  mkdir -p "$HOME/mlflow"
  if [ -z "${MLFLOW_BACKEND:-}" ] && [ -n "${MLFLOW_ARTIFACTS:-}" ]; then
    echo "$MLFLOW_ARTIFACTS/mlflow.db" > "$HOME/mlflow/kept_at"
    python "$here/keep.py" restore "$database" "$MLFLOW_ARTIFACTS/mlflow.db"
    setsid nohup flock -n "$logs/keep.lock" python "$here/keep.py" watch "$database" "$MLFLOW_ARTIFACTS/mlflow.db" \
      >> "$logs/keep.log" 2>&1 < /dev/null &
  fi
  if ! curl -sf -o /dev/null "http://$head_ip:5000/health"; then
    # On all interfaces, because workers log to it. The security group keeps others out, and MLflow asks for a password.
    cd "$HOME/mlflow"   # its user database is in the working directory
    MLFLOW_AUTH_ADMIN_PASSWORD=$RAY_AUTH_TOKEN MLFLOW_FLASK_SERVER_SECRET_KEY=$RAY_AUTH_TOKEN \
      MLFLOW_SERVER_ALLOWED_HOSTS="$head_ip:5000,localhost:*,127.0.0.1:*" \
      setsid nohup mlflow server --app-name basic-auth --workers 2 --host 0.0.0.0 --port 5000 \
      --backend-store-uri "${MLFLOW_BACKEND:-sqlite:///$database}" \
      --artifacts-destination "${MLFLOW_ARTIFACTS:-$HOME/mlflow/artifacts}" > "$logs/mlflow.log" 2>&1 < /dev/null &
    echo $! > "$HOME/mlflow/pid"   # with setsid, also the id of its process group
    cd
  fi
  ray start --head --port=6379 --object-manager-port=8076 --dashboard-host=127.0.0.1 \
    --autoscaling-config="$HOME/ray_bootstrap_config.yaml" "$@"
  for _ in $(seq 90); do
    curl -sf -o /dev/null "http://$head_ip:5000/health" && exit 0
    sleep 2
  done
  echo "MLflow does not answer at http://$head_ip:5000; the end of $logs/mlflow.log:" >&2
  tail -n 20 "$logs/mlflow.log" >&2
  exit 1
else
  ray start --address="$RAY_HEAD_IP:6379" --object-manager-port=8076 "$@"
  setsid nohup flock -n "$logs/spot.lock" python "$here/spot.py" >> "$logs/spot.log" 2>&1 < /dev/null &
fi
