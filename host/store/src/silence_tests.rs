//! A test of connections to the server that carry nothing any more, although neither side learns of an end: a firewall has forgotten
//! them, or the address of the server belongs to another machine now. Without a server it passes without a check.

use crate::{
    host_tests::{Database, agent},
    *,
};
use std::time::Duration;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    time::timeout,
};

/// Time in which the host has to work again. The operating system would try for a quarter of an hour.
const PATIENCE: Duration = Duration::from_secs(60);

/// A way to a server whose connections can be made silent. Later ones work.
struct Way {
    port: u16,
    silences: watch::Sender<u32>,
}

impl Way {
    async fn to(server: (String, u16)) -> Way {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let way = Way { port: listener.local_addr().unwrap().port(), silences: watch::Sender::new(0) };
        let silences = way.silences.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (server, mut silences) = (server.clone(), silences.subscribe());
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(server).await else { return };
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        // Both ends stay open.
                        _ = silences.changed() => std::future::pending::<()>().await,
                    }
                });
            }
        });
        way
    }

    fn silence(&self) {
        self.silences.send_modify(|silences| *silences += 1);
    }
}

#[tokio::test]
async fn a_host_whose_connections_carry_nothing_any_more_opens_others() {
    let Some(database) = Database::new().await else { return };
    let way = Way::to(database.server.address()).await;
    let server = database.server.clone().through(way.port);
    let host = Store::join(server, "http://host").await.unwrap();
    host.put_agent(&agent(), b"component", &[]).await.unwrap();
    assert!(host.session("a", "s").await.unwrap().is_none());
    host.meet_hosts("{}", false).await.unwrap();
    way.silence();

    // The write comes before the next renewal of the lease.
    let commit = TurnCommit { agent: "a".into(), session: "s".into(), turn: 1, ..Default::default() };
    timeout(PATIENCE, host.commit_turn(commit)).await.expect("it connects again").unwrap();
    let read = async {
        loop {
            // The first attempts may meet the connections that were lost.
            if let Ok(session) = host.session("a", "s").await
                && host.meet_hosts("{}", false).await.is_ok()
            {
                return session.map(|session| session.row.turns);
            }
        }
    };
    assert_eq!(timeout(PATIENCE, read).await.expect("it connects again"), Some(1));
}
