//! `/v1/kv`: KV pages on disk.

use crate::{ApiError, Gateway, access::Details};
use axum::{
    Extension, Json,
    extract::{Query, State},
};
use serde::Deserialize;
use skep_api::{KvClusterCache, KvDisk, KvDiskTotals, KvPeers, KvPin, KvPurged, marker};
use skep_engine::{EraseScope, PinStatus, TierStatus};
use skep_runtime::{AgentName, Tenant};
use std::fmt;
use utoipa::IntoParams;

/// Shows what the disk holds of the KV cache.
#[utoipa::path(get, path = "/v1/kv", tag = "host", operation_id = "get_kv_disk", responses(
    (status = 200, description = "The state of the disk.", body = KvDisk),
))]
pub(crate) async fn show(State(gateway): State<Gateway>) -> Json<KvDisk> {
    let status = gateway.host.kv_disk();
    let is_on = status.is_some();
    let TierStatus {
        max_bytes,
        used_bytes,
        pages,
        tenants,
        pages_at_start,
        written_bytes,
        read_bytes,
        read_pages,
        evicted_pages,
        erased_pages,
        damaged_pages,
        dropped_pages,
        queued_bytes,
        written_pages,
        written_today_bytes,
        written_yesterday_bytes,
    } = status.unwrap_or_default();
    Json(KvDisk {
        object: marker::KvDisk,
        is_on,
        max_bytes,
        used_bytes,
        pages,
        tenants,
        pages_at_start,
        totals: KvDiskTotals {
            written_bytes,
            written_pages,
            read_bytes,
            read_pages,
            evicted_pages,
            erased_pages,
            damaged_pages,
            dropped_pages,
        },
        queued_bytes,
        written_today_bytes,
        written_yesterday_bytes,
        pins: gateway.host.pinned_sessions().into_iter().map(pinned).collect(),
        peers: peers(&gateway),
        cluster_cache: gateway.options.cluster_cache.as_ref().map(|cache| cache.status()),
    })
}

/// A cache that the hosts share in their memory, whose state `/v1/kv` shows.
pub trait ClusterCache: fmt::Debug + Send + Sync {
    fn status(&self) -> KvClusterCache;
}

/// Returns what went to and came from other hosts; `None` if nothing does.
fn peers(gateway: &Gateway) -> Option<KvPeers> {
    let pages = gateway.cluster.as_ref()?.pages.as_ref()?;
    let figures = pages.figures();
    Some(KvPeers {
        lane: pages.lane().to_owned(),
        questions: figures.questions,
        missed: figures.missed,
        fetched_pages: figures.fetched_pages,
        fetched_bytes: figures.fetched_bytes,
        given_pages: figures.given_pages,
        given_bytes: figures.given_bytes,
    })
}

fn pinned(PinStatus { pin, bytes, is_protected }: PinStatus) -> KvPin {
    KvPin { tenant: pin.tenant, agent: pin.agent, session: pin.session, bytes, is_protected }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct PurgeQuery {
    /// Erases the pages of this tenant only.
    tenant: Option<String>,
    /// Erases the pages that only sessions of this agent have.
    agent: Option<String>,
    /// Erases the pages that only this session of the agent has.
    session: Option<String>,
}

/// Erases KV pages from the disk: of a tenant, of an agent, of a session, or without parameters all of them. Sessions and
/// their messages stay, and what they need again is computed again.
#[utoipa::path(delete, path = "/v1/kv", tag = "host", operation_id = "purge_kv_disk", params(PurgeQuery), responses(
    (status = 200, description = "The number of pages that were erased.", body = KvPurged),
    (status = 400, description = "`invalid_request`"),
))]
pub(crate) async fn purge(
    State(gateway): State<Gateway>,
    Query(query): Query<PurgeQuery>,
) -> Result<(Extension<Details>, Json<KvPurged>), ApiError> {
    let PurgeQuery { tenant, agent, session } = query;
    let agent = agent.map(|agent| AgentName::new(&agent).map(|name| name.to_string())).transpose()?;
    let tenant = tenant.map(|tenant| Tenant::new(&tenant).map(|name| name.to_string())).transpose()?;
    let (details, pages) = match (tenant, agent, session) {
        (None, None, None) => ("all".to_owned(), EraseScope::Everyone),
        (Some(tenant), None, None) => (format!("tenant={tenant}"), EraseScope::Tenant(tenant)),
        (None, Some(agent), None) => (format!("agent={agent}"), EraseScope::Agent(agent)),
        (None, Some(agent), Some(session)) => {
            (format!("agent={agent} session={session}"), EraseScope::Session { agent, session })
        }
        _ => {
            let message = "name a tenant, an agent, or an agent and a session";
            return Err(ApiError::parameter("session", message));
        }
    };
    let erased = gateway.host.purge_kv_disk(pages).await?;
    Ok((Extension(Details(details)), Json(KvPurged { object: marker::KvDisk, erased_pages: erased })))
}
