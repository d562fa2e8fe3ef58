//! `/v1/status`: version and models, queued work, and limits that are nearly exhausted.

use crate::{ApiError, Gateway};
use axum::{Json, extract::State};
use skep_api::{
    AgentCounts, DataPlace, DiskStatus, HeldWork, HostStatus, KvPages, LimitStatus, ModelStatus, QueueDepths,
    SessionCounts, marker,
};
use skep_engine::{Engine, EngineStats};
use skep_runtime::{DiskUse, Held, HostLoad, LimitUse};

/// The profile that this process was built with.
const PROFILE: &str = if cfg!(debug_assertions) { "debug" } else { "release" };

/// Shows what the host is, what it has to do, and how far its limits are used.
#[utoipa::path(get, path = "/v1/status", tag = "host", operation_id = "get_status", responses(
    (status = 200, description = "The status.", body = HostStatus),
))]
pub(crate) async fn show(State(gateway): State<Gateway>) -> Result<Json<HostStatus>, ApiError> {
    let host = &gateway.host;
    let report = host.load().await?;
    let held = host.held().await?;
    let HostLoad { work, waiting_messages, dead_letters, data, disk, is_disk_low, limits } = report;
    let models = host.models().engines().map(|engine| model_status(&engine)).collect();
    let mut limits: Vec<LimitStatus> = limits.into_iter().map(limit_status).collect();
    limits.extend(host.models().engines().flat_map(|engine| limits_of(&engine)));
    Ok(Json(HostStatus {
        object: marker::Status,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: format!("{PROFILE}, {} {}", std::env::consts::ARCH, std::env::consts::OS),
        uptime_s: gateway.started.elapsed().as_secs(),
        address: gateway.address.map(|address| address.to_string()),
        models,
        agents: AgentCounts { ready: host.agents().len() as u64, failed: host.failed_agents().len() as u64 },
        sessions: SessionCounts {
            total: work.sessions,
            active_turns: work.running_turns,
            waiting_for_approval: work.parked_turns,
        },
        queues: QueueDepths {
            messages: waiting_messages,
            alarms: work.alarms,
            events: work.events,
            webhooks: work.webhooks,
            dead_letters,
            batches: work.batches,
            batch_requests: work.batch_requests,
        },
        held: held.map(|held| held_work(held, work.held_sessions)),
        data: match data {
            skep_runtime::DataPlace::Folder => DataPlace::Folder,
            skep_runtime::DataPlace::Postgres => DataPlace::Postgres,
            skep_runtime::DataPlace::Memory => DataPlace::Memory,
        },
        disk: disk.map(|disk| disk_status(disk, is_disk_low)),
        limits,
    }))
}

pub(super) fn limit_status(LimitUse { name, used, limit }: LimitUse) -> LimitStatus {
    LimitStatus { name: name.to_owned(), of: None, used, limit }
}

fn model_status(engine: &Engine) -> ModelStatus {
    let (info, stats) = (engine.info(), engine.stats());
    ModelStatus {
        name: info.name.clone(),
        device: info.device.to_string(),
        replicas: info.replicas as u64,
        context_length: info.context_length as u64,
        kv_pages: KvPages {
            total: stats.pages_total as u64,
            used: used_pages(&stats) as u64,
            cached: stats.pages_cached as u64,
        },
        running: stats.running as u64,
        waiting: stats.waiting as u64,
        problem: engine.problem().map(|problem| problem.to_string()),
    }
}

/// Returns the number of pages that running sequences hold. Pages that are only cached can be had at any time.
fn used_pages(stats: &EngineStats) -> usize {
    stats.pages_total.saturating_sub(stats.pages_free)
}

fn limits_of(engine: &Engine) -> [LimitStatus; 2] {
    let (info, stats) = (engine.info(), engine.stats());
    let limit = |name: &str, used: usize, limit: usize| LimitStatus {
        name: name.to_owned(),
        of: Some(info.name.clone()),
        used: used as u64,
        limit: limit as u64,
    };
    [
        limit("max_queue", stats.waiting, engine.queue_limit()),
        limit("kv_pages", used_pages(&stats), stats.pages_total),
    ]
}

fn held_work(held: Held, sessions: u64) -> HeldWork {
    let Held { turns, deliveries, schedules, batches, .. } = held;
    HeldWork { sessions, turns, deliveries, schedules, batches }
}

fn disk_status(DiskUse { database, wal, free }: DiskUse, is_low: bool) -> DiskStatus {
    DiskStatus { database_bytes: database, wal_bytes: wal, free_bytes: free, is_low }
}
