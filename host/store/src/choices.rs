//! Choices that the hosts of a cluster make together: the first one that is made stays, for hosts that start later, too.

use crate::{
    Store, StoreError,
    sql::{query, query_scalar},
};

impl Store {
    /// Makes a choice unless it was made before. Returns what was chosen, which is the same at all hosts and does not change.
    /// Without a cluster, each host chooses for itself.
    pub async fn choose(&self, name: &str, value: &str) -> Result<String, StoreError> {
        if self.membership.is_none() {
            return Ok(value.to_owned());
        }
        self.write_common((name.to_owned(), value.to_owned()), |connection, (name, value)| {
            Box::pin(async move {
                let failed = || StoreError::while_it("made a choice for all hosts");
                query("INSERT INTO choices (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING")
                    .bind(name)
                    .bind(value)
                    .execute(&mut *connection)
                    .await
                    .map_err(failed())?;
                let chosen = query_scalar("SELECT value FROM choices WHERE name = ?").bind(name);
                let chosen: Result<String, _> = chosen.fetch_one(connection).await;
                chosen.map_err(failed())
            })
        })
        .await
    }

    /// Returns a choice that was made; `None` without a cluster.
    pub async fn choice(&self, name: &str) -> Result<Option<String>, StoreError> {
        let Some(membership) = &self.membership else { return Ok(None) };
        query_scalar("SELECT value FROM choices WHERE name = ?")
            .bind(name)
            .fetch_optional(&membership.meeting)
            .await
            .map_err(StoreError::while_it("read a choice of all hosts"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cluster_tests::member, host_tests::Database};

    #[tokio::test]
    async fn without_a_cluster_each_host_chooses_for_itself() {
        let store = Store::for_tests().await.unwrap();
        assert_eq!(store.choose("model", "a").await.unwrap(), "a");
        assert_eq!(store.choose("model", "b").await.unwrap(), "b");
        assert_eq!(store.choice("model").await.unwrap(), None);
    }

    #[tokio::test]
    async fn the_first_choice_is_that_of_all_hosts() {
        let Some(database) = Database::new().await else { return };
        let (one, other) = (member(&database, "one").await, member(&database, "other").await);
        assert_eq!(one.choice("model").await.unwrap(), None);
        let (of_one, of_other) = tokio::join!(one.choose("model", "a"), other.choose("model", "b"));
        let chosen = of_one.unwrap();
        assert_eq!(of_other.unwrap(), chosen);
        let late = member(&database, "late").await;
        assert_eq!(late.choose("model", "c").await.unwrap(), chosen);
        assert_eq!(late.choice("model").await.unwrap(), Some(chosen));
    }
}
