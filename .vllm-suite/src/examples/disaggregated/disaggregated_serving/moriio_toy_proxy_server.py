# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# Minimal single-node reference proxy for MoRI-IO prefill/decode disaggregation.
# It demonstrates the DP-rank pinning contract the connector expects: pick one
# prefill DP rank per request (flat_interleaved_dp_route) and pin BOTH legs to it
# via the ``X-data-parallel-rank`` header plus ``kv_transfer_params``
# (``remote_dp_rank`` / ``remote_dp_size`` / ``remote_tp_size``).
#
# Scope: single-node only. It intentionally does NOT supply the cross-pod
# Wide-EP (2P2D) peer info -- ``remote_hosts`` / ``multi_pod_hosts``,
# ``data_parallel_size_local``, ``is_request_leader``. In real multi-pod
# deployments that peer info is produced by a production routing sidecar, e.g.:
#   * llm-d-router  (https://github.com/llm-d/llm-d-router)
#   * vLLM's own vllm-router (examples in the vllm-project org)
#   * or any NIXL-shaped router that sets the same kv_transfer_params contract.
# Use this file as a protocol reference, not a production router.
import argparse
import asyncio
import copy
import logging
import os
import socket
import threading
import uuid
from urllib.parse import urlparse

import aiohttp
import msgpack
import zmq
from quart import Quart, Request, make_response, request

from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import (
    MoRIIOConstants,
)

logger = logging.getLogger(__name__)
logger.setLevel(logging.DEBUG)
prefill_instances: list[dict] = []
decode_instances: list[dict] = []
request_nums = 0
app = Quart(__name__)


TRANSFER_TYPE = None


_list_lock = threading.RLock()


def _listen_for_register(hostname, port):
    context = zmq.Context()
    router_socket = context.socket(zmq.ROUTER)
    router_socket.bind(f"tcp://{hostname}:{port}")
    poller = zmq.Poller()
    poller.register(router_socket, zmq.POLLIN)
    global prefill_instances
    global decode_instances

    while True:
        socks = dict(poller.poll())
        if router_socket in socks:
            remote_addr, msg = router_socket.recv_multipart()
            data = msgpack.loads(msg)
            if data.get("type") == "HELLO":
                pass
            elif data.get("type") in ("P", "D"):
                role = data["type"]
                required_keys = {
                    "http_address",
                    "zmq_address",
                    "dp_size",
                    "tp_size",
                    "transfer_mode",
                }
                missing = required_keys - data.keys()
                if missing:
                    logger.error(
                        "Registration message missing required keys %s; skipping",
                        missing,
                    )
                    continue
                # Derive request_address from http_address
                # api path suffix is appended at request time
                instance = {
                    "role": role,
                    "request_address": f"http://{data['http_address']}/v1",
                    "http_address": data["http_address"],
                    "zmq_address": data["zmq_address"],
                    "dp_size": data["dp_size"],
                    "tp_size": data["tp_size"],
                    "transfer_mode": data["transfer_mode"],
                }
                # zmq_address format: "host:IP,handshake:PORT,notify:PORT"
                # Stored verbatim; embedded into the request_id by handle_request.

                global TRANSFER_TYPE
                transfer_mode = instance["transfer_mode"]
                target_list = prefill_instances if role == "P" else decode_instances
                with _list_lock:
                    if TRANSFER_TYPE is None:
                        TRANSFER_TYPE = transfer_mode
                        logger.info("SET TRANSFER TYPE TO %s", TRANSFER_TYPE)
                    elif transfer_mode != TRANSFER_TYPE:
                        logger.error(
                            "Mismatched transfer mode: expected %s, got %s;"
                            " skipping registration of %s",
                            TRANSFER_TYPE,
                            transfer_mode,
                            data["http_address"],
                        )
                        continue
                    existing_idx = next(
                        (
                            idx
                            for idx, i in enumerate(target_list)
                            if i.get("http_address") == data["http_address"]
                        ),
                        None,
                    )
                    if existing_idx is not None:
                        target_list[existing_idx] = instance
                        logger.info(
                            "Updated existing %s instance: %s",
                            "Prefill" if role == "P" else "Decode",
                            instance,
                        )
                    else:
                        target_list.append(instance)
                        logger.info(
                            "Registered %s instance: %s",
                            "Prefill" if role == "P" else "Decode",
                            instance,
                        )
            else:
                logger.warning(
                    "Received message with unrecognized type %r; ignoring",
                    data.get("type"),
                )


def start_service_discovery(hostname, port):
    if not hostname:
        hostname = socket.gethostname()
    if port == 0:
        raise ValueError("Port cannot be 0")

    _listener_thread = threading.Thread(
        target=_listen_for_register, args=(hostname, port), daemon=True
    )
    _listener_thread.start()
    return _listener_thread


async def send_request_to_prefill(
    endpoint, req_data, request_id, selected_prefill_dp_rank
):
    req_data_copy = req_data

    req_data_copy["kv_transfer_params"].update(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
        }
    )
    req_data_copy["stream"] = False
    req_data_copy["max_tokens"] = 1
    if "max_completion_tokens" in req_data_copy:
        req_data_copy["max_completion_tokens"] = 1
    if "stream_options" in req_data_copy:
        del req_data_copy["stream_options"]
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=6 * 6000 * 6000)
    ) as session:
        headers = {
            "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}",
            "X-Request-Id": request_id,
        }
        if selected_prefill_dp_rank is not None:
            headers["X-data-parallel-rank"] = str(selected_prefill_dp_rank)
        async with session.post(
            url=endpoint, json=req_data_copy, headers=headers
        ) as response:
            if response.status == 200:
                return await response.json()

            else:
                error_message = (
                    f"send_request_to_prefill response ={response},"
                    f"reason={response.reason}, status={response.status},"
                    f"method={response.method}, url={response.url},"
                    f"real_url={response.real_url}"
                )
                raise RuntimeError(error_message)


async def start_decode_request(endpoint, req_data, request_id, selected_dp_rank=None):
    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=6 * 6000 * 6000)
    )
    headers = {
        "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}",
        "X-Request-Id": request_id,
    }
    # Pin the decode leg to the same DP rank as its prefill leg so both land on
    # the same rank (vLLM reads this header directly; no engine-side routing).
    if selected_dp_rank is not None:
        headers["X-data-parallel-rank"] = str(selected_dp_rank)
    response = await session.post(url=endpoint, json=req_data, headers=headers)
    return session, response


async def stream_decode_response(session, response, request_id):
    try:
        if response.status == 200:
            async for chunk_bytes in response.content.iter_chunked(1024):
                yield chunk_bytes
        else:
            error_message = (
                f"stream_decode_response response ={response},"
                f"reason={response.reason}, status={response.status},"
                f"method={response.method}, url={response.url},"
                f"real_url={response.real_url}"
            )
            raise RuntimeError(error_message)
    finally:
        await session.close()


def flat_interleaved_dp_route(request_number, instances):
    """Flat round-robin over the full (instance, dp_rank) slot space.

    ONE counter over (n_instances * dp_size) slots, so instance-selection and
    DP-rank-selection are derived from the SAME index and can never alias. The
    previous scheme computed instance = req % n and rank = req % dp from the
    same counter with n | dp, which locked each instance to a stride-n subset
    of its ranks (e.g. 2 prefill instances -> 4 of 8 ranks each -> half the
    GPUs never receive a request, so the deployment falsely appears not to
    scale).

    Interleaved order — inst0_r0, inst1_r0, inst0_r1, inst1_r1, ... — so
    consecutive requests alternate instances AND every rank gets walked.

    Assumes homogeneous dp_size across a role's instances (true for the
    DP<->DP and DP<->TP deployments this proxy targets). Returns
    (instance_index, dp_rank); dp_rank is None when dp_size == 1 (e.g. a TP
    decode), which avoids forwarding an out-of-range data-parallel rank.
    """
    n = len(instances)
    dp = instances[0]["dp_size"]
    slot = (request_number - 1) % (n * dp)
    inst_idx = slot % n
    dp_rank = (slot // n) if dp > 1 else None
    return inst_idx, dp_rank


@app.route("/health", methods=["GET"])
async def health():
    # Benchmark harnesses and load balancers often probe the proxy URL and
    # treat a non-200 response as a dead service. Backends expose /health, but
    # this proxy used to lack one; report the proxy process itself as healthy.
    return ("ok", 200)


@app.route("/v1/completions", methods=["POST"])
async def handle_completions_request():
    return await handle_request("/completions", request)


@app.route("/v1/chat/completions", methods=["POST"])
async def handle_chat_completions_request():
    return await handle_request("/chat/completions", request)


async def handle_request(api: str, request: Request):
    try:
        with _list_lock:
            global request_nums
            request_nums += 1

        req_data = await request.get_json()

        prefill_instance_endpoint = None
        decode_instance_endpoint = None
        error_msg = (
            "Service Unavailable: No prefill or decode instances are registered."
        )
        if not prefill_instances or not decode_instances:
            return await make_response(
                (
                    error_msg,
                    503,
                )
            )
        # Flat interleaved round-robin (see flat_interleaved_dp_route): ONE
        # counter over the full (instance, dp_rank) slot space per role, so
        # instance-selection and DP-rank-selection derive from the same index
        # and can never alias. The old scheme keyed both on request_nums with
        # n_instances | dp_size, stranding half the ranks (e.g. in 2P_DP8EP).
        pid, selected_prefill_dp_rank = flat_interleaved_dp_route(
            request_nums, prefill_instances
        )
        # Decode instance selection uses the same interleaved walk; in READ
        # mode the decode reads KV from selected_prefill_dp_rank, so the
        # decode's own dp_rank is not forwarded here.
        did, _ = flat_interleaved_dp_route(request_nums, decode_instances)
        prefill_instance_endpoint = prefill_instances[pid]
        decode_instance_endpoint = decode_instances[did]

        # Embed both zmq_addresses in the request_id so the connector can parse
        # the peer's host/ports from it, similar to P2P-NCCL
        uid = str(uuid.uuid4()).replace("-", "")
        request_id = (
            f"___prefill_addr_{prefill_instance_endpoint['zmq_address']}"
            f"___decode_addr_{decode_instance_endpoint['zmq_address']}"
            f"_{uid}"
        )

        transfer_id = f"{MoRIIOConstants.TRANSFER_PREFIX}-{str(uuid.uuid4())}"

        req_data_to_prefill = copy.deepcopy(req_data)
        req_data_to_prefill["kv_transfer_params"] = {}
        req_data["kv_transfer_params"] = {}
        req_data_to_prefill["kv_transfer_params"]["remote_dp_size"] = (
            decode_instance_endpoint["dp_size"]
        )
        req_data_to_prefill["kv_transfer_params"]["remote_tp_size"] = (
            decode_instance_endpoint["tp_size"]
        )
        req_data_to_prefill["kv_transfer_params"]["transfer_id"] = transfer_id

        prefill_request_url = prefill_instance_endpoint["request_address"] + api
        send_prefill_task = asyncio.create_task(
            send_request_to_prefill(
                prefill_request_url,
                req_data_to_prefill,
                request_id,
                selected_prefill_dp_rank,
            )
        )

        # max_completion_tokens takes precedence when present (that's the limit
        # the backend enforces); fall back to max_tokens. If neither is set
        # (e.g. benchmark clients that omit it), leave the request unchanged.
        if "max_completion_tokens" in req_data:
            req_data["max_completion_tokens"] -= 1
        elif "max_tokens" in req_data:
            req_data["max_tokens"] -= 1

        req_data["kv_transfer_params"] = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "transfer_id": transfer_id,
        }
        if TRANSFER_TYPE == "READ":
            # In read mode, prefill and decode are executed serially.
            prefill_response = await send_prefill_task
            prefill_kv = prefill_response["kv_transfer_params"]
            req_data["kv_transfer_params"]["remote_engine_id"] = prefill_kv[
                "remote_engine_id"
            ]
            req_data["kv_transfer_params"]["remote_block_ids"] = prefill_kv[
                "remote_block_ids"
            ]
            req_data["kv_transfer_params"]["transfer_id"] = prefill_kv["transfer_id"]
            if prefill_kv.get("tp_size") is not None:
                req_data["kv_transfer_params"]["tp_size"] = prefill_kv["tp_size"]

        req_data["kv_transfer_params"]["remote_dp_size"] = prefill_instance_endpoint[
            "dp_size"
        ]
        req_data["kv_transfer_params"]["remote_tp_size"] = prefill_instance_endpoint[
            "tp_size"
        ]

        if selected_prefill_dp_rank is not None:
            req_data["kv_transfer_params"]["remote_dp_rank"] = selected_prefill_dp_rank

        decode_request_url = decode_instance_endpoint["request_address"] + api
        decode_request_task = asyncio.create_task(
            start_decode_request(
                decode_request_url, req_data, request_id, selected_prefill_dp_rank
            )
        )

        session, decode_response = await decode_request_task
        stream_generator = stream_decode_response(session, decode_response, request_id)
        response = await make_response(stream_generator)
        response.headers["Content-Type"] = decode_response.headers.get(
            "Content-Type", "application/json"
        )
        return response
    except Exception as e:
        logger.exception("An error occurred while handling the request: %s", e)
        return await make_response(
            (
                f"Internal Server Error: {e!s}",
                500,
            )
        )


async def send_profile_cmd(req_data: dict, profiler_cmd: str):
    assert profiler_cmd in {"start", "stop"}

    with _list_lock:
        p_instances = list(prefill_instances)
        d_instances = list(decode_instances)

    if not p_instances and not d_instances:
        raise RuntimeError(
            "Service Unavailable: No prefill or decode instances are registered."
        )

    headers = {
        "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}",
    }

    tasks = []

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=60)
    ) as session:
        for instances in (p_instances, d_instances):
            for inst in instances:
                _p = urlparse(inst["request_address"])
                url = f"http://{_p.hostname}:{_p.port}/{profiler_cmd}_profile"

                tasks.append(
                    session.post(
                        url,
                        json=req_data,
                        headers=headers,
                    )
                )

        responses = await asyncio.gather(*tasks, return_exceptions=True)

        for r in responses:
            if isinstance(r, Exception):
                raise r
            if r.status >= 400:
                msg = await r.text()
                raise RuntimeError(f"{profiler_cmd}_profile failed: {r.status}, {msg}")

        return await responses[0].json()


@app.post("/start_profile")
async def start_profile():
    try:
        req_data = await request.get_json()
        return await send_profile_cmd(req_data, "start")
    except Exception as e:
        logger.exception("start_profile failed: %s", e)
        return await make_response((str(e), 500))


@app.post("/stop_profile")
async def stop_profile():
    try:
        req_data = await request.get_json()
        return await send_profile_cmd(req_data, "stop")
    except Exception as e:
        logger.exception("stop_profile failed: %s", e)
        return await make_response((str(e), 500))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=10001)
    # Port the prefill/decode servers register on (their proxy_ping_port).
    parser.add_argument("--service-discovery-port", type=int, default=36367)
    args = parser.parse_args()

    t = start_service_discovery("0.0.0.0", args.service_discovery_port)
    # High-concurrency hardening. Quart's app.run() uses a shallow listen
    # backlog (100) and, with app.debug=True, adds per-request overhead that
    # starves the single accept loop. Under a burst of ~512 simultaneous client
    # connections the backlog overflows and the kernel RSTs the excess, so
    # clients see "ClientOSError: [Errno 104] Connection reset by peer" before
    # any response (~16% request loss at c=512). Serve via hypercorn with debug
    # OFF and a deep backlog so the burst QUEUES (higher TTFT) instead of being
    # reset -> 100% request success.
    app.debug = False
    app.config["BODY_TIMEOUT"] = 360000
    app.config["RESPONSE_TIMEOUT"] = 360000

    import asyncio
    import os

    from hypercorn.asyncio import serve as _hypercorn_serve
    from hypercorn.config import Config as _HypercornConfig

    _hcfg = _HypercornConfig()
    _hcfg.bind = [f"0.0.0.0:{args.port}"]
    # Deep listen backlog so a wide connection burst queues, not RSTs. NOTE:
    # effective backlog is capped by the host's net.core.somaxconn (proxy runs
    # --network host); kernel 6.x defaults to 4096. Override via
    # PROXY_LISTEN_BACKLOG.
    _hcfg.backlog = int(os.environ.get("PROXY_LISTEN_BACKLOG", "4096"))
    # Long-lived SSE streams (8k1k decode ~5 min): never reap on keepalive.
    _hcfg.keep_alive_timeout = 360000.0

    asyncio.run(_hypercorn_serve(app, _hcfg))
    t.join()
