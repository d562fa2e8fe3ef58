//! `/v1/cluster`: the hosts that share the database, and handing over what one of them owns.

use crate::{ApiError, Gateway};
use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
};
use skep_api::{
    ClusterHost, ClusterHostRole, ClusterHostState, ClusterHostWork, ClusterHosts, ClusterVersions,
};
use skep_runtime::{HostRole, HostVersions, Member};

/// Shows the hosts that share the database with this one. A host that is not in a cluster shows itself.
#[utoipa::path(get, path = "/v1/cluster", tag = "host", operation_id = "get_cluster", responses(
    (status = 200, description = "The hosts that are alive.", body = ClusterHosts),
))]
pub(crate) async fn show(State(gateway): State<Gateway>) -> Result<Json<ClusterHosts>, ApiError> {
    let hosts = gateway.host.cluster_hosts().await?;
    Ok(Json(ClusterHosts { hosts: hosts.into_iter().map(described).collect() }))
}

/// Asks a host to hand its sessions over to the others and to end. Its running turns may finish within the time that its
/// settings give them.
#[utoipa::path(post, path = "/v1/cluster/hosts/{number}/drain", tag = "host", operation_id = "drain_host",
    params(("number" = i64, Path, description = "Number of the host")),
    responses(
        (status = 202, description = "The host drains, and then ends."),
        (status = 404, description = "`host_not_found`: no host that is alive has this number."),
        (status = 409, description = "`not_clustered`: this host is not in a cluster."),
    ))]
pub(crate) async fn drain(
    State(gateway): State<Gateway>,
    Path(number): Path<i64>,
) -> Result<StatusCode, ApiError> {
    let Some(cluster) = &gateway.cluster else {
        let message = "this host is not in a cluster, so there is no other host that could take over; stop it with SIGTERM";
        return Err(ApiError::new(StatusCode::CONFLICT, "not_clustered", message));
    };
    let hosts = gateway.host.cluster_hosts().await?;
    let Some(host) = hosts.iter().find(|host| host.number == number) else {
        let known: Vec<String> = hosts.iter().map(|host| host.number.to_string()).collect();
        let message = format!("no host has the number {number}; the hosts are: {}", known.join(", "));
        return Err(ApiError::new(StatusCode::NOT_FOUND, "host_not_found", message));
    };
    cluster.drain(&Member { number: host.number, url: host.url.clone() }).await?;
    Ok(StatusCode::ACCEPTED)
}

fn described(host: skep_runtime::ClusterHost) -> ClusterHost {
    let skep_runtime::ClusterHost {
        number,
        url,
        version,
        versions: HostVersions { protocol, schema },
        is_draining,
        is_this,
        started_at_ms,
        seen_ms_ago,
        lease_left_ms,
        role,
        models,
        sessions,
        running_turns,
        load_percent,
        waiting_requests,
        tokens,
    } = host;
    let name = url.split_once("://").map_or(url.as_str(), |(_, name)| name).trim_end_matches('/').to_owned();
    ClusterHost {
        number,
        name,
        url,
        version,
        versions: Some(ClusterVersions { protocol, schema }),
        state: if is_draining { ClusterHostState::Draining } else { ClusterHostState::Serving },
        this: is_this,
        started_at: timestamp(started_at_ms),
        seen_ms_ago,
        lease_left_ms,
        role: match role {
            HostRole::All => ClusterHostRole::All,
            HostRole::Gateway => ClusterHostRole::Gateway,
            HostRole::Prefill => ClusterHostRole::Prefill,
            HostRole::Decode => ClusterHostRole::Decode,
            HostRole::Balancer => ClusterHostRole::Balancer,
        },
        models,
        work: ClusterHostWork {
            sessions,
            running_turns,
            load_percent,
            waiting_requests,
            prefill_tokens: tokens.prefill,
            decode_tokens: tokens.decode,
        },
    }
}

/// Writes a time in UTC as RFC 3339 does.
fn timestamp(at_ms: u64) -> String {
    let (day, in_day_ms) = (at_ms / 86_400_000, at_ms % 86_400_000);
    let (year, month, date) = date(day);
    let (hour, minute) = (in_day_ms / 3_600_000, in_day_ms / 60_000 % 60);
    let (second, ms) = (in_day_ms / 1_000 % 60, in_day_ms % 1_000);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// Returns the year, the month and the day of a day since 1970, as <https://howardhinnant.github.io/date_algorithms.html>
/// computes them: years begin in March, so that the day that some years lack is their last one.
fn date(day: u64) -> (u64, u64, u64) {
    let day = day + 719_468;
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..10 => (year + era * 400, month + 3),
        _ => (year + era * 400 + 1, month - 9),
    };
    (year, month, date)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_in_utc() {
        for (at_ms, expected) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_868_800_000, "2000-03-01T00:00:00.000Z"),
            (1_735_689_599_000, "2024-12-31T23:59:59.000Z"),
            (1_767_323_045_006, "2026-01-02T03:04:05.006Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(timestamp(at_ms), expected);
        }
    }
}
