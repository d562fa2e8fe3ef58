//! `/v1/status`: what the host is, what it has to do, and which of its limits are nearly used up.

use crate::{ApiError, Gateway};
use axum::{Json, extract::State};
use serde::Serialize;
use serde_json::{Value, json};
use skep_engine::{Engine, EngineStats};
use skep_runtime::{DiskUse, Held, LimitUse, QueuedWork, Standing};

/// The profile that this process was built with.
const PROFILE: &str = if cfg!(debug_assertions) { "debug" } else { "release" };

pub(crate) async fn show(State(gateway): State<Gateway>) -> Result<Json<Value>, ApiError> {
    let host = &gateway.host;
    let standing = host.standing().await?;
    let held = host.held().await?;
    let Standing { work, waiting_messages, dead_letters, disk, is_disk_low, mut limits } = standing;
    let models: Vec<Value> = host.models().iter().map(model_json).collect();
    for engine in host.models().iter() {
        limits.extend(limits_of(engine));
    }
    let QueuedWork { sessions, running_turns, parked_turns, held_sessions, alarms, events, webhooks, .. } =
        work;
    Ok(Json(json!({
        "object": "status",
        "version": env!("CARGO_PKG_VERSION"),
        "build": format!("{PROFILE}, {} {}", std::env::consts::ARCH, std::env::consts::OS),
        "uptime_s": gateway.started.elapsed().as_secs(),
        "address": gateway.address.map(|address| address.to_string()),
        "models": models,
        "agents": {"ready": host.agents().len(), "failed": host.failed_agents().len()},
        "sessions": {
            "total": sessions,
            "active_turns": running_turns,
            "waiting_for_approval": parked_turns,
        },
        "queues": {
            "messages": waiting_messages,
            "alarms": alarms,
            "events": events,
            "webhooks": webhooks,
            "dead_letters": dead_letters,
            "batches": work.batches,
            "batch_requests": work.batch_requests,
        },
        "held": held_json(held, held_sessions),
        "disk": disk.map(|disk| disk_json(disk, is_disk_low)),
        "limits": limits.into_iter().map(LimitJson::from).collect::<Vec<_>>(),
    })))
}

#[derive(Serialize)]
struct LimitJson {
    name: String,
    used: u64,
    limit: u64,
}

impl From<LimitUse> for LimitJson {
    fn from(LimitUse { name, used, limit }: LimitUse) -> Self {
        LimitJson { name: name.to_owned(), used, limit }
    }
}

fn model_json(engine: &Engine) -> Value {
    let (info, stats) = (engine.info(), engine.stats());
    json!({
        "name": info.name,
        "device": info.device,
        "replicas": info.replicas,
        "context_length": info.context_length,
        "kv_pages": {
            "total": stats.pages_total,
            "used": used_pages(&stats),
            "cached": stats.pages_cached,
        },
        "running": stats.running,
        "waiting": stats.waiting,
        "problem": engine.problem(),
    })
}

/// Returns the number of pages that running sequences hold. Pages that are only cached can be had at any time.
fn used_pages(stats: &EngineStats) -> usize {
    stats.pages_total.saturating_sub(stats.pages_free)
}

fn limits_of(engine: &Engine) -> [LimitUse; 2] {
    let stats = engine.stats();
    let limit = |name, used: usize, limit: usize| LimitUse { name, used: used as u64, limit: limit as u64 };
    [
        limit("max_queue", stats.waiting, engine.queue_limit()),
        limit("kv_pages", used_pages(&stats), stats.pages_total),
    ]
}

fn held_json(held: Option<Held>, sessions: u64) -> Option<Value> {
    let Held { turns, deliveries, schedules, batches, .. } = held?;
    Some(json!({
        "sessions": sessions,
        "turns": turns,
        "deliveries": deliveries,
        "schedules": schedules,
        "batches": batches,
    }))
}

fn disk_json(DiskUse { database, wal, free }: DiskUse, is_low: bool) -> Value {
    json!({"database_bytes": database, "wal_bytes": wal, "free_bytes": free, "is_low": is_low})
}
