#!/usr/bin/env bash
# One step of a measuring session on a GPU machine: gpu_session.sh STEP [more arguments for the bench]
# Results and logs go to $OUT (./out by default); every step ends within $STEP_S seconds (540). Python needs vLLM, torch
# and this folder's packages; semkv itself is taken from ../src. Steps:
#   check      memory; a tiny engine with and one without the connector, versions in its result
#   kv         kv: hits in memory, decoding, then from disk
#   cold       kv: what a connector costs a prompt that is computed
#   kv-6       kv: chats at 6 requests a second       kv-20   at 20, 80 users       kv-tp2   at 10 on two GPUs
#   kv-6-short the same with documents of half the length: no queue
#   fusion     fusion_load: encoder outputs
#   families   identity: a small model of every family                     families-tp2  llama, granite4, deepseek_v3
#   identity   identity: Qwen3-VL-2B's shape, both connectors              identity-tp2
#   positions  positions: documents at another position, Qwen2.5-7B's shape
#   documents-delay    documents_delay: what decoding requests wait for; with --decoding 16, then 64: 4 minutes each
#   documents-disk     documents_disk: documents that lie on disk only
#   documents-cost     documents_cost: requests without documents; documents-cost-stores: while prompts are stored
#   documents-train    documents_quality: a small model that answers questions about documents, into $DOCUMENTS
#   documents-quality  documents_quality: with it, how many answers are right where documents are reused
#   documents-identity documents_quality: with it, log-probabilities against those of the computed prompt
#   pictures-train     pictures_quality: a small model that answers questions about pictures, into $PICTURES
#   pictures-quality   pictures_quality: with it, how many answers are right where pictures are reused
#   documents-pictures documents_identity: the same with pictures, Qwen3-VL-2B's shape
#   documents-tp2      documents_identity: the same without, Qwen2.5-1.5B's shape, on two GPUs
#   documents-stress   documents_stress: a random load on tiny models, of which much fails; some arms with two GPUs
#   documents-order    documents: prefill throughput with and without an order, Qwen2.5-7B's shape
#   by-size    tiers_by_size: time without semkv, of hits and of misses, Qwen3-VL's shapes; within 450 s
#   train      minigqa-vlm of 138 million parameters from $START (start_large.py) into $LARGE, in $MINUTES (9)
#   tiers      specs/tiers-large.json with it: accuracy and time of every tier, and of the arms of --reuse; an engine's
#              start takes a minute, the first arm of a data set starts two: about 20 minutes in all (STEP_S)
set -uo pipefail
step=${1:?the name of a step}; shift
here=$(cd "$(dirname "$0")" && pwd); root=$(dirname "$here")
out=${OUT:-$PWD/out}; mkdir -p "$out"
scratch=${SCRATCH:-/tmp/bench-scratch}; mkdir -p "$scratch" /tmp/semkv-site/semkv-0.dist-info
# Stands for an installed package: vLLM finds the connectors by this entry point.
printf 'Metadata-Version: 2.1\nName: semkv\nVersion: 0\n' >/tmp/semkv-site/semkv-0.dist-info/METADATA
printf '[vllm.general_plugins]\nsemkv = semkv_vllm:register\n' >/tmp/semkv-site/semkv-0.dist-info/entry_points.txt
parts=$(printf '%s:' "$root"/packages/*/src)
export PYTHONPATH="$root/src:$parts/tmp/semkv-site:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 PYTHONHASHSEED=0 HF_HUB_OFFLINE=1
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-/tmp/vllm-cache} VLLM_NO_USAGE_STATS=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 # no NVLink multicast
limit=${STEP_S:-540}

alone() { # NAME SCRIPT ARGUMENTS: its output also as a log; stopped in time
    local name=$1 script=$2; shift 2
    timeout -k 15 "$limit" python3 "$here/$script" "$@" 2>&1 | tee "$out/$name.log"
    return "${PIPESTATUS[0]}"
}

bench() { # NAME SCRIPT ARGUMENTS: the same with engines of its own, whose logs are kept
    local name=$1 script=$2; shift 2
    alone "$name" "$script" --logs "$scratch/logs-$name" "$@"
    local status=$?
    tar -C "$scratch" -czf "$out/$name-logs.tgz" "logs-$name" 2>/dev/null
    return "$status"
}

widen_shm() { # Host memory that engines share lies there; its bound may be half of the memory there was at the start.
    mount -o remount,size="${SHM:-100G}" /dev/shm 2>/dev/null || echo "/dev/shm stays as it is"
}

check() {
    widen_shm
    df -h /dev/shm "$scratch"; free -g | head -2; nproc
    nvidia-smi --query-gpu=name,memory.used,memory.total --format=csv,noheader
    kv check --tiny --engines none,offload,semkv "$@"
}

kv() { # NAME ARGUMENTS
    local name=$1; shift
    bench "$name" kv.py --scratch "$scratch" --out "$out/$name.json" "$@"
}

large=${LARGE:-/tmp/minigqa-vlm-large}
documents=${DOCUMENTS:-/tmp/documents-model}
pictures=${PICTURES:-/tmp/pictures-model}

train() {
    timeout -k 15 "$limit" python3 "$root/training/minigqa_vlm/train.py" --start "${START:?the folder that start_large.py made}" \
        --documents --rate 3e-4 --minutes "${MINUTES:-9}" --out "$large" "$@" 2>&1 | tee "$out/train.log"
    local status=${PIPESTATUS[0]}
    cp "$large/training_log.jsonl" "$out/train.jsonl"
    return "$status"
}

tiers() {
    cd "$scratch" && mkdir -p runs && ln -sfn "$large" runs/minigqa-vlm-large
    timeout -k 15 "$limit" python3 -m semkv sweep --specs "$root/specs/tiers-large.json" \
        --log-file "$scratch/tiers/sweep.csv" --samples-dir "$scratch/tiers" "$@" 2>&1 | tee "$out/tiers.log"
    local status=${PIPESTATUS[0]}
    cp "$scratch/tiers/sweep.jsonl" "$out/tiers.jsonl"
    tar -C "$scratch" -czf "$out/tiers-samples.tgz" tiers
    return "$status"
}

case $step in
check) check "$@" ;;
kv) kv kv --rounds-of-chats 0 "$@" ;;
kv-6) kv kv-6 --repeats 0 --rounds-of-chats 3 --engines offload,offload-again,semkv "$@" ;;
kv-6-short) kv kv-6-short --repeats 0 --rounds-of-chats 3 --engines offload,offload-again,semkv --document 3000,4500 "$@" ;;
cold) kv cold --repeats 8 --rounds-of-chats 0 --engines none,idle,offload,semkv --lengths 8192 --many 1 "$@" ;;
kv-20) kv kv-20 --repeats 0 --engines offload,semkv --users 80 --rate 20 --engine-args '{"max_num_seqs": 128}' "$@" ;;
kv-tp2) kv kv-tp2 --repeats 0 --engines offload,semkv --tp 2 --rate 10 "$@" ;;
fusion) bench fusion fusion_load.py --out "$out/fusion-load.json" "$@" ;;
families) bench families identity.py --models families --out "$out/families.json" --jobs 8 --limit 170 "$@" ;;
families-tp2) bench families-tp2 identity.py --models llama,granite4,deepseek_v3 --ranks 2 --jobs 3 --limit 200 \
    --out "$out/families-tp2.json" "$@" ;;
identity) bench identity identity.py --models qwen3-vl-2b --samples 8 --out "$out/identity.json" "$@" ;;
identity-tp2) bench identity-tp2 identity.py --models qwen3-vl-2b --samples 6 --ranks 2 --engine-args '{"enforce_eager": true}' \
    --out "$out/identity-tp2.json" "$@" ;;
positions) alone positions positions.py --out "$out/positions.json" "$@" ;;
documents-delay) widen_shm; alone documents-delay documents_delay.py --out "$out/documents-delay.json" "$@" ;;
documents-disk) widen_shm; alone documents-disk documents_disk.py --out "$out/documents-disk.json" "$@" ;;
documents-cost) widen_shm; bench documents-cost documents_cost.py --out "$out/documents-cost.json" "$@" ;;
documents-cost-stores) widen_shm; bench documents-cost-stores documents_cost.py --stores --rounds 5 \
    --out "$out/documents-cost-stores.json" "$@" ;;
documents-train) alone documents-train documents_quality.py train --model "$documents" --out "$out/documents-train.json" "$@" ;;
documents-quality) alone documents-quality documents_quality.py measure --model "$documents" \
    --out "$out/documents-quality.json" "$@" ;;
documents-identity) alone documents-identity documents_quality.py identity --model "$documents" --sets 60 \
    --out "$out/documents-identity.json" "$@" ;;
pictures-train) alone pictures-train pictures_quality.py train --model "$pictures" --out "$out/pictures-train.json" "$@" ;;
pictures-quality) alone pictures-quality pictures_quality.py measure --model "$pictures" \
    --out "$out/pictures-quality.json" "$@" ;;
documents-pictures) alone documents-pictures documents_identity.py pictures --out "$out/documents-pictures.json" "$@" ;;
documents-tp2) alone documents-tp2 documents_identity.py text --ranks 2 --out "$out/documents-tp2.json" "$@" ;;
documents-stress) bench documents-stress documents_stress.py --out "$out/documents-stress.json" "$@" ;;
documents-order) alone documents-order documents.py --engine qwen2.5-7b --sizes 256 1024 --caches 65536 --requests 600 \
    --rounds 1 --out "$out/documents-order.json" "$@" ;;
by-size) widen_shm; bench by-size tiers_by_size.py --out "$out/tiers-by-size.json" "$@" ;;
train) train "$@" ;;
tiers) tiers "$@" ;;
*) sed -n '2,29p' "$0"; exit 2 ;;
esac
status=$?
nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader 2>/dev/null # nothing should be left
echo "step $step: status $status"
exit "$status"
