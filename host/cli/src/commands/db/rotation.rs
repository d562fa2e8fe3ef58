//! `skep db rotate-key`.

use anyhow::Result;
use skep_runtime::{Resealed, SealingKey, reseal};

use super::{DatabaseTarget, alone, out, refuse_absent};
use crate::database_flag::DatabaseAddress;

/// Seals all secrets with the new key, and prints how many there were.
pub async fn run(DatabaseTarget { address, sealing_key }: &DatabaseTarget) -> Result<()> {
    if let DatabaseAddress::Sqlite(path) = address {
        refuse_absent(path)?;
    }
    let (store, _lock) = alone(address).await?;
    let resealed = reseal(&store, sealing_key).await;
    store.close().await;
    let Resealed { secrets, webhooks } = resealed?;
    if secrets + webhooks == 0 {
        return out::line("nothing is sealed, so the key stays");
    }
    let next = match sealing_key {
        SealingKey::Command(_) => "; the old key is not needed anymore",
        _ => "; a backup of the old key opens only older backups of the database",
    };
    out::line(&format!(
        "sealed {} and {} with the new key of {sealing_key}{next}",
        out::count(secrets, "secret"),
        out::count(webhooks, "webhook")
    ))
}
