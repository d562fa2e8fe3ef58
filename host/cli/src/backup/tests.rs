//! Tests of backups of folders that no host uses, and of backups that are refused.

use super::*;
use crate::data_lock::DataLock;
use crate::progress::Silent;
use crate::server;
use skep_store::{ApiKeyRow, BatchRoom, BatchTerms, Durability, NewBatch, NewItem, Queued, Store};

async fn data_folder(folder: &Path) -> PathBuf {
    let data = folder.join("data");
    std::fs::create_dir_all(data.join(ARTIFACTS)).expect("a folder");
    let store = Store::open(&server::database(&data), Durability::Process).await.expect("a database");
    let key = ApiKeyRow {
        id: "key-1".into(),
        digest: [7; 32],
        tenant: "local".into(),
        role: "admin".into(),
        agents: None,
        name: String::new(),
        created_at_ms: 1,
        expires_at_ms: None,
        revoked_at_ms: None,
        last_used_day: None,
        requests_per_minute: None,
        bodies: false,
    };
    store.put_api_key(&key).await.expect("a row");
    let batch = NewBatch {
        id: "b".into(),
        principal: "local".into(),
        model: "m".into(),
        at_ms: 1,
        items: vec![NewItem { request: "{}".into(), reference: None }],
        terms: BatchTerms::default(),
    };
    let room = BatchRoom { bytes: 1_000, batches: 1, share: None };
    assert_eq!(store.queue_batch(batch, room, None).await.expect("a row"), Queued::New);
    store.close().await;
    std::fs::write(data.join(KEY), "the key").expect("a file");
    std::fs::write(data.join(ARTIFACTS).join("one"), "code").expect("a file");
    data
}

async fn keys_of(data: &Path) -> usize {
    let store = Store::open(&server::database(data), Durability::Process).await.expect("a database");
    let keys = store.api_keys().await.expect("rows").len();
    store.close().await;
    keys
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_backup_is_the_same_data_folder_and_an_existing_one_is_moved_aside() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = data_folder(folder.path()).await;
    let backup = folder.path().join("backups/monday");
    let manifest = take(&data, &backup, &Silent).await.expect("a backup");
    assert_eq!((manifest.files.len(), manifest.batches), (3, 1), "{manifest:?}");
    #[cfg(unix)]
    for file in [DATABASE, KEY, MANIFEST] {
        let mode = std::fs::metadata(backup.join(file)).expect("a file").permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600, "{file}");
    }
    let again = take(&data, &backup, &Silent).await.expect_err("the folder exists").to_string();
    assert!(again.contains("is not empty"), "{again}");

    let other = folder.path().join("other");
    let restored = restore(&backup, &other, false, &Silent).await.expect("restored");
    assert_eq!((restored.held.backup_at_ms, restored.moved), (manifest.taken_at_ms, None));
    assert_eq!(keys_of(&other).await, 1);
    assert_eq!(std::fs::read_to_string(other.join(KEY)).expect("the key"), "the key");
    assert_eq!(std::fs::read_to_string(other.join("artifacts/one")).expect("the code"), "code");

    let refused = restore(&backup, &other, false, &Silent).await.expect_err("the folder exists").to_string();
    assert!(refused.contains("--force"), "{refused}");
    let moved = restore(&backup, &other, true, &Silent).await.expect("restored").moved.expect("moved");
    assert_eq!((keys_of(&other).await, keys_of(&moved).await), (1, 1));

    let lock = DataLock::take(&other).expect("free");
    let used = restore(&backup, &other, true, &Silent).await.expect_err("in use").to_string();
    assert!(used.contains("in use by another host"), "{used}");
    take(&other, &folder.path().join("of-a-running-host"), &Silent).await.expect("beside a host");
    drop(lock);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_that_is_damaged_or_too_new_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = data_folder(folder.path()).await;
    let change = |backup: &Path, change: &dyn Fn(&mut serde_json::Value)| {
        let path = backup.join(MANIFEST);
        let mut value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        change(&mut value);
        std::fs::write(&path, value.to_string()).expect("written");
    };
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path), &'a str);
    let cases: [Damage<'_>; 7] = [
        ("key", &|backup| std::fs::write(backup.join(KEY), "another").expect("written"), "SHA-256"),
        (
            "database",
            &|backup| {
                let mut bytes = std::fs::read(backup.join(DATABASE)).expect("a file");
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
                std::fs::write(backup.join(DATABASE), bytes).expect("written");
            },
            "SHA-256",
        ),
        ("missing", &|backup| std::fs::remove_file(backup.join(KEY)).expect("removed"), "cannot read"),
        ("format", &|backup| change(backup, &|value| value["format"] = 9.into()), "newer skep"),
        ("schema", &|backup| change(backup, &|value| value["schema"] = 9_999.into()), "upgrade skep"),
        (
            "path",
            &|backup| change(backup, &|value| value["files"][1]["path"] = "artifacts/../../x".into()),
            "not a file of a backup",
        ),
        ("none", &|backup| std::fs::remove_file(backup.join(MANIFEST)).expect("removed"), "is not a backup"),
    ];
    for (name, damage, expected) in cases {
        let backup = folder.path().join(name);
        take(&data, &backup, &Silent).await.expect(name);
        damage(&backup);
        let target = folder.path().join(format!("restored-{name}"));
        let error = format!("{:#}", restore(&backup, &target, false, &Silent).await.expect_err(name));
        assert!(error.contains(expected), "{name}: {error}");
        assert!(!target.exists(), "{name}");
    }
    let left = std::fs::read_dir(folder.path()).expect("a folder").flatten();
    let left = left.filter(|entry| entry.file_name().to_string_lossy().starts_with(".skep-"));
    assert_eq!(left.count(), 0, "no incomplete folder is left");
    let absent = take(&folder.path().join("absent"), &folder.path().join("x"), &Silent).await;
    assert!(absent.expect_err("no data folder").to_string().contains("not the data folder of a host"));
}

#[test]
fn a_disk_without_room_is_reported_before_anything_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    check_room(folder.path(), 1).expect("there is room for a byte");
    let error = check_room(folder.path(), u64::MAX / 2).expect_err("no disk is so large").to_string();
    assert!(error.contains("MB free") && error.contains("hint:"), "{error}");
}
