//! Follows a stream of a host until it is interrupted. A host that is gone may come back; one that was never there is an
//! error.

use std::time::Duration;

use anyhow::Result;
use serde::de::DeserializeOwned;

use crate::client::Follower;
use crate::failure::Refused;

/// Delay before a host that is gone is asked again; it doubles each time that the host is still gone.
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(3);

/// Prints each event. `connect` continues after the event with this id.
pub async fn follow<T: DeserializeOwned>(
    connect: impl AsyncFn(Option<i64>) -> Result<Follower<T>>,
    print: impl Fn(&T) -> Result<()>,
) -> Result<()> {
    let mut stream = connect(None).await?;
    let mut last = None;
    loop {
        while let Ok((id, event)) = stream.next().await {
            print(&event)?;
            last = id.or(last);
        }
        stream = connect_again(&connect, last).await?;
    }
}

async fn connect_again<T>(
    connect: &impl AsyncFn(Option<i64>) -> Result<Follower<T>>,
    last: Option<i64>,
) -> Result<Follower<T>> {
    let mut wait = FIRST_RETRY;
    let mut is_told = false;
    loop {
        match connect(last).await {
            Ok(stream) => {
                if is_told {
                    eprintln!("  the host is back");
                }
                return Ok(stream);
            }
            // The host is there but refuses the request, for example because the agent is gone.
            Err(error)
                if error.downcast_ref().is_some_and(|refused: &Refused| refused.code != "shutting_down") =>
            {
                return Err(error);
            }
            Err(_gone) => {
                if !is_told {
                    eprintln!("  lost the connection to the host; waiting for it to come back");
                    is_told = true;
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(LAST_RETRY);
            }
        }
    }
}
