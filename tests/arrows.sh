#!/bin/sh
# The include arrows hold:   proto <- shm <- io_daemon,  shm <- compute,  cmd and tests include all.
# io_daemon and compute never include each other; nng is seen by tests only, which try it against our sockets; liburing by io_daemon only.
#
#   arrows.sh TOP    says every include that breaks a rule and exits 1, also when TOP holds none of the folders
set -eu
top=$1
broken=0

# includes FOLDER PATTERN: "file: what it includes" for every include in FOLDER's sources that matches.
includes() {
    find "$top/$1" -name '*.[ch]' -exec grep -HoE "^[[:space:]]*#[[:space:]]*include[[:space:]]*[\"<]$2" {} + 2>/dev/null |
        sed "s|^$top/||; s|:.*[\"<]|: |" || true
}

# deny REASON: reads such lines; each is a fault.
deny() {
    faults=$(cat)
    [ -z "$faults" ] || {
        echo "$faults" | sed "s|\$|   ($1)|"
        return 1
    }
}

for folder in proto shm io_daemon compute cmd; do
    case $folder in
        proto) allowed='proto' ;;
        shm) allowed='proto|shm' ;;
        io_daemon) allowed='proto|shm|io_daemon' ;;
        compute) allowed='proto|shm|compute' ;;
        cmd) allowed='proto|shm|io_daemon|compute|cmd' ;;
    esac
    [ -d "$top/$folder" ] || { echo "$top has no folder $folder"; broken=1; continue; }
    [ -n "$(includes "$folder" '.*')" ] || { echo "$top/$folder includes nothing at all"; broken=1; }
    # Ours are in quotes and written from the root.
    find "$top/$folder" -name '*.[ch]' -exec grep -HE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' {} + |
        grep -vE "\"($allowed)/[^\"]+\"" | sed "s|^$top/||" |
        deny "$folder includes only $(echo "$allowed" | tr '|' ' '), written from the root" || broken=1
done
for folder in proto shm io_daemon compute cmd; do
    includes "$folder" 'nng/' | deny 'nng belongs to tests' || broken=1
done
for folder in proto shm compute cmd; do
    includes "$folder" 'liburing' | deny 'liburing belongs to io_daemon' || broken=1
done
exit $broken
