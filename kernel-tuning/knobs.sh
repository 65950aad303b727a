# shellcheck shell=bash disable=SC2034 # much of this is read by the scripts that source it
# The settings that a node feels, in one table, and how each is looked at. Sourced by `check`, `apply` and `revert`,
# so that the three cannot differ about what is wanted. Nothing here writes, but for `put` and `remember`.
#
# A knob is a row: name, the files behind it, the rule that judges them, why it is wanted, what to say where there is
# no such file. A rule gives each file its verdict and, if it differs, the value that it should have.

# name | files | rule | why | where absent
host_knobs='
kernel.io_uring_disabled|/proc/sys/kernel/io_uring_disabled|exactly 0|without rings the portable engine serves, at about twice the system calls|the kernel is older than 6.6, or has no io_uring
memlock|/proc/self/limits|limit 4 unlimited LimitMEMLOCK=infinity memlock|registered buffers count against it; where it is short the node serves unregistered|the kernel tells no limits
nofile|/proc/self/limits|limit 5 65536 LimitNOFILE=1048576 nofile|one for every client, every connection to an origin and every drive|the kernel tells no limits
vm.nr_hugepages|/proc/sys/vm/nr_hugepages|any|the node takes no page of this pool, and what lies in it is lost to the arena|the kernel has no such pool
transparent_hugepage|/sys/kernel/mm/transparent_hugepage/enabled|chosen madvise always|the arena asks for pages of 2 MiB: one translation for each|the kernel is built without them
shmem_enabled|/sys/kernel/mm/transparent_hugepage/shmem_enabled|chosen advise within_size always|an arena in shared memory gets its huge pages as it is first touched, not by collapsing small ones later|the kernel is built without them
net.core.somaxconn|/proc/sys/net/core/somaxconn|at_least 4096|a training job connects all at once, and the node listens with a queue of 4096|no network here
net.ipv4.tcp_wmem|/proc/sys/net/ipv4/tcp_wmem|third_at_least 4194304|a hit of 1 MiB leaves in one piece if the send buffer may hold it more than twice|no network here
net.core.wmem_max|/proc/sys/net/core/wmem_max|at_least 4194304|the most that a UDP socket may ask for to send HTTP/3|not seen from this network namespace
net.core.rmem_max|/proc/sys/net/core/rmem_max|at_least 4194304|the most that a UDP socket may ask for; what comes beyond it is dropped|not seen from this network namespace
net.core.rmem_default|/proc/sys/net/core/rmem_default|at_least 1048576|what a UDP socket gets that does not ask; a burst of HTTP/3 beyond it is dropped|not seen from this network namespace
cpu governor|/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor|exactly performance|a worker that wakes for 50 us of work never lets a slow core speed up|the hypervisor or the firmware governs
'
# The same for one drive; DRIVE is its name in /sys/block. The scheduler comes first: to change it resets the second.
drive_knobs='
scheduler of DRIVE|/sys/block/DRIVE/queue/scheduler|chosen none|the node has ordered its reads already; a scheduler only makes them wait|this device has no queue
nr_requests of DRIVE|/sys/block/DRIVE/queue/nr_requests|depth 256|reads beyond it wait in the kernel with a worker none the wiser|this device has no queue
read_ahead_kb of DRIVE|/sys/block/DRIVE/queue/read_ahead_kb|at_least 128|felt only where a file system refuses direct reads and the node reads through the page cache|this device has no queue
'
irq_why='a device whose queues interrupt one CPU makes the worker there the slow one'

root=""                                   # a tree to work on in place of the machine's, for tests
state=/var/lib/forebay/kernel-tuning.state
json=no dry=no accepted=""
drives=()                                 # as they were named: a device, a file on one, or a name in /sys/block
names=() files=() rules=() whys=() absents=()

die() {
    echo "${0##*/}: $1" >&2
    exit "${2:-2}"
}

# options WORDS... : reads the command line; $accepted holds the options that this script has.
options() {
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help)
            sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
            exit 0
            ;;
        --*)
            case " $accepted " in *" $1 "*) ;; *) die "no option $1; there are: $accepted" ;; esac
            case $1 in
            --json) json=yes ;;
            --dry-run) dry=yes ;;
            --state | --root)
                [ -n "${2:-}" ] || die "$1 wants a path after it"
                if [ "$1" = --state ]; then state=$2 state_named=yes; else root=$2; fi
                shift
                ;;
            esac
            ;;
        -*) die "no option $1; there are: $accepted" ;;
        *)
            case " $accepted " in *" DRIVE... "*) ;; *) die "\`$1\` is one word too many; there are: $accepted" ;; esac
            drives+=("$1")
            ;;
        esac
        shift
    done
    if [ -n "$root" ]; then
        root=$(cd "$root" 2>/dev/null && pwd -P) || die "--root wants a folder"
        [ -n "${state_named:-}" ] || state=$root$state
    fi
}

# ---- looking ------------------------------------------------------------------------------------------------

# raw FILE : what is in it, without the last newline.
raw() { { [ -r "$root$1" ] && printf '%s' "$(<"$root$1")"; } 2>/dev/null; }

# current FILE : its value; of a choice like `none [mq-deadline] kyber` the one that is taken.
current() {
    local text
    text=$(raw "$1") || return 1
    case $text in
    *\[*\]*)
        text=${text#*\[}
        text=${text%%\]*}
        ;;
    esac
    printf '%s' "$text"
}

is_number() { case $1 in '' | *[!0-9]*) return 1 ;; esac; }

# plain TEXT : in one line, single blanks between words.
plain() {
    local words
    read -r -d '' -a words <<<"$1"
    printf '%s' "${words[*]}"
}

add_knob() {
    local list=() file
    for file in "$root"$2; do # a pattern that matches nothing stays as it is
        [ ! -r "$file" ] || list+=("${file#"$root"}")
    done
    names+=("$1") files+=("${list[*]}") rules+=("$3") whys+=("$4") absents+=("$5")
}

# rows TABLE NAME : a table's knobs, with DRIVE replaced by NAME.
rows() {
    local name pattern rule why absent
    while IFS='|' read -r name pattern rule why absent; do
        [ -z "$name" ] || add_knob "$name" "$pattern" "$rule" "$why" "$absent"
    done <<<"${1//DRIVE/$2}"
}

# leaves FOLDER : the names of the drives below a block device: a partition's whole, a mapped device's parts.
leaves() {
    local folder=$1 part found=no
    [ -e "$folder/queue" ] || folder=${folder%/*}
    for part in "$folder"/slaves/*; do
        [ -e "$part" ] || continue
        found=yes
        leaves "$(readlink -f "$part")"
    done
    [ "$found" = yes ] || echo "${folder##*/}"
}

in_sys_block() { case $1 in */* | .*) return 1 ;; *) [ -e "$root/sys/block/$1" ] ;; esac; }

# drive_names WORD : the names in /sys/block that WORD stands for; none if it is not on a block device.
drive_names() {
    local number folder
    if in_sys_block "$1"; then
        folder=$(readlink -f "$root/sys/block/$1")
    elif [ -b "$1" ]; then
        folder=$(readlink -f "$root/sys/dev/block/$((0x$(stat -c %t "$1"))):$((0x$(stat -c %T "$1")))")
    else
        number=$(stat -L -c %d "$1")
        folder=$(readlink -f "$root/sys/dev/block/$((number >> 8 & 0xfff)):$((number & 0xff | number >> 12 & 0xfff00))")
    fi
    if [ -d "$folder" ]; then leaves "$folder"; fi
}

online_cpus=()
# cpus LIST : `0-2,5` as `0 1 2 5`.
cpus() {
    local span spans cpu
    IFS=',' read -ra spans <<<"$1"
    for span in "${spans[@]}"; do
        for ((cpu = ${span%-*}; cpu <= ${span#*-}; cpu++)); do printf '%s ' "$cpu"; done
    done
}

# interrupts FOLDER : the files of the queues' interrupts of the device in FOLDER, in order. Those for settings and
# events are left out; nvme's first is its admin queue.
interrupts() {
    local folder=$1 number uses
    while [ ! -d "$folder/msi_irqs" ]; do
        folder=${folder%/*}
        case $folder in "$root/sys/devices"/*) ;; *) return ;; esac
    done
    for number in $(cd "$folder/msi_irqs" && printf '%s\n' * | sort -n); do
        uses=$(cd "$root/proc/irq/$number" 2>/dev/null && echo */) # a folder for each that is called
        case $uses in
        *config* | *event* | *admin* | *async* | *control* | *mgm* | *misc* | nvme*q0/*) ;;
        *) [ ! -r "$root/proc/irq/$number/smp_affinity_list" ] || echo "/proc/irq/$number/smp_affinity_list" ;;
        esac
    done
}

interrupt_knob() {
    local list
    mapfile -t list < <(interrupts "$2")
    names+=("irq affinity of $1") files+=("${list[*]}") rules+=(spread) whys+=("$irq_why")
    absents+=("no queue of it has an interrupt of its own")
}

# gather : the knobs of this machine and of the drives that were named.
gather() {
    local word name seen=" " device found
    rows "$host_knobs" ""
    read -ra online_cpus <<<"$(cpus "$(raw /sys/devices/system/cpu/online)")"
    for word in "${drives[@]}"; do
        if [ ! -e "$word" ] && ! in_sys_block "$word"; then
            die "there is no $word; name a device, a file on one, or one of: $(cd "$root/sys/block" 2>/dev/null && echo *)"
        fi
        mapfile -t found < <(drive_names "$word")
        if [ ${#found[@]} = 0 ]; then
            names+=("drive of $word") files+=("") rules+=(any) whys+=("its queue cannot be looked at")
            absents+=("it lies on no block device of this machine")
        fi
        for name in "${found[@]}"; do
            case $seen in *" $name "*) continue ;; esac
            seen+="$name "
            rows "$drive_knobs" "$name"
            interrupt_knob "$name" "$(readlink -f "$root/sys/block/$name/device")"
        done
    done
    for device in "$root"/sys/class/net/*/device; do
        [ -e "$device" ] || continue
        name=${device%/device}
        interrupt_knob "${name##*/}" "$(readlink -f "$device")"
    done
}

# look INDEX : one knob. Sets $value, $wanted, $verdict (ok, differs, unknown), $change (a command, or words), and
# $list with, beside each file, $targets: what it should be set to, or nothing where that is not for us to do.
look() {
    local rule words index file
    read -ra list <<<"${files[$1]}"
    read -ra words <<<"${rules[$1]}"
    rule=${words[0]}
    targets=() value="" wanted="" verdict=ok change=""
    if [ ${#list[@]} = 0 ]; then
        verdict=unknown value="absent: ${absents[$1]}"
    else
        for file in "${list[@]}"; do targets+=(""); done
        value=$(plain "$(raw "${list[0]}")")
    fi
    "rule_$rule" "${words[@]:1}"
    [ -n "$change" ] || change=$(command_for "${names[$1]}")
    for index in "${!targets[@]}"; do
        [ "${targets[index]}" != "$(current "${list[index]}")" ] || targets[index]=""
    done
}

# set_all VALUE : the value that every file of this knob should have.
set_all() {
    local index
    for index in "${!list[@]}"; do targets[index]=$1; done
    verdict=differs
}

rule_any() {
    wanted="anything"
    change="nothing to change"
}

rule_exactly() {
    local file
    wanted=$1
    for file in "${list[@]}"; do
        [ "$(current "$file")" = "$1" ] || set_all "$1"
    done
    # Many files: each value once, with how many have it.
    [ ${#list[@]} -le 1 ] ||
        value=$(for file in "${list[@]}"; do current "$file" && echo; done | sort | uniq -c | awk '{ printf "%s%s (%d of them)", c, $2, $1; c = ", " }')
}

# The first is what would be set; the others are as good.
rule_chosen() {
    local word now
    wanted="$1$(for word in "${@:2}"; do printf ' or %s' "$word"; done)"
    [ ${#list[@]} != 0 ] || return
    now=$(current "${list[0]}")
    for word in "$@"; do [ "$now" != "$word" ] || return; done
    set_all "$1"
}

rule_at_least() {
    wanted="at least $1"
    [ ${#list[@]} != 0 ] || return
    if ! is_number "$value"; then verdict=unknown; elif [ "$value" -lt "$1" ]; then set_all "$1"; fi
}

rule_third_at_least() {
    local first second third
    wanted="third number at least $1"
    [ ${#list[@]} != 0 ] || return
    read -r first second third <<<"$value"
    if ! is_number "$third"; then verdict=unknown; elif [ "$third" -lt "$1" ]; then
        set_all "$first"$'\t'"$second"$'\t'"$1"
    fi
}

# Without a scheduler the drive's own queue is the limit, and the kernel refuses more.
rule_depth() {
    local least=$1 tags queue
    if [ ${#list[@]} != 0 ]; then
        queue=${list[0]%/*}
        tags=$(raw "${queue%/*}/mq/0/nr_tags")
        if is_number "$tags" && [ "$tags" -lt "$least" ] && [ "$(current "$queue/scheduler")" = none ]; then
            rule_at_least "$tags"
            wanted+=", all that the drive takes"
            return
        fi
    fi
    rule_at_least "$least"
}

# limit COLUMN LEAST SYSTEMD NAME : of the shell that runs this, which hands it on. Not ours to set.
rule_limit() {
    local label="Max locked memory" now capabilities
    [ "$4" = memlock ] || label="Max open files"
    wanted=$([ "$2" = unlimited ] && echo "unlimited, or the node's --memory" || echo "at least $2")
    change="$3 in the unit of systemd, or a line \`* - $4 ${3#*=}\` in /etc/security/limits.d/60-forebay.conf"
    change=${change//infinity\`/unlimited\`}
    [ ${#list[@]} != 0 ] || return
    now=$(raw "${list[0]}" | sed -n "s/^$label *//p" | awk -v column="$1" '{ print $(column - 3) }')
    value=$now
    if [ "$4" = memlock ]; then
        capabilities=$(raw /proc/self/status | sed -n 's/^CapEff:[[:space:]]*//p')
        ! is_number "$now" || value="$((now >> 10)) KiB"
        if [ $((0x${capabilities:-0} >> 14 & 1)) = 1 ] && [ "$now" != unlimited ]; then
            value+=", to which CAP_IPC_LOCK is not held"
            return
        fi
    fi
    if [ "$now" = unlimited ]; then return; fi
    if ! is_number "$now"; then verdict=unknown; elif [ "$2" = unlimited ] || [ "$now" -lt "$2" ]; then verdict=differs; fi
}

# The interrupts of one device, each to its own CPU in turn. As wanted if no CPU may get more than its share: that is
# so as well where the driver spreads them itself.
rule_spread() {
    local n=${#list[@]} count=${#online_cpus[@]} share index cpu file load=() most=0
    wanted="one CPU each, in turn"
    [ "$n" != 0 ] || { change="nothing to change"; return; }
    value=""
    for file in "${list[@]}"; do
        index=${file%/*}
        value+="${value:+, }${index##*/} on $(raw "$file")"
    done
    if grep -lsx irqbalance "$root"/proc/[0-9]*/comm >/dev/null; then
        verdict=unknown value+="; irqbalance moves them"
        change="nothing, or stop irqbalance first"
        return
    fi
    if [ "$n" -lt 2 ] || [ "$count" -lt 2 ]; then
        value+="; nothing to spread"
        change="nothing to change"
        return
    fi
    share=$(((n + count - 1) / count))
    for file in "${list[@]}"; do
        for cpu in $(cpus "$(raw "$file")"); do
            load[cpu]=$((${load[cpu]:-0} + 1))
            [ "${load[cpu]}" -le "$most" ] || most=${load[cpu]}
        done
    done
    [ "$most" -gt "$share" ] || return
    verdict=differs
    for index in "${!list[@]}"; do targets[index]=${online_cpus[index % count]}; done
}

# command_for NAME : what a person would type; for a knob that is as wanted, what keeps it so.
command_for() {
    local index goal text=""
    if [ ${#list[@]} = 0 ]; then
        echo "nothing to change here"
        return
    fi
    if [ ${#list[@]} -gt 1 ] && [ "$rule" = exactly ]; then
        echo "echo $wanted | tee ${list[0]//cpu0/cpu*}"
        return
    fi
    for index in "${!list[@]}"; do
        goal=${targets[index]:-$(current "${list[index]}")}
        case ${list[index]} in
        /proc/sys/*)
            goal=$(plain "$goal")
            case $goal in *' '*) goal="'$goal'" ;; esac
            text+="sysctl -w $1=$goal"
            ;;
        *) text+="${text:+; }echo $goal > ${list[index]}" ;;
        esac
    done
    echo "$text"
}

# ---- the record of what was, and writing --------------------------------------------------------------------

# One line for what boot it is of, then one a file: its name, a blank, its value as it was. A value set at run time
# is forgotten when the machine goes down, so a record of an earlier boot is of no use.
boot() { raw /proc/sys/kernel/random/boot_id || echo unknown; }
header="forebay kernel-tuning 1, boot"

record=()
recorded=" "
# read_record : status 1 if there is none, 2 if it is of an earlier boot.
read_record() {
    local line first=yes status=0
    [ -e "$state" ] || return 1
    [ -r "$state" ] || die "cannot read $state; run as root: sudo $0" 1
    while IFS= read -r line || [ -n "$line" ]; do
        if [ $first = yes ]; then
            first=no
            case $line in
            "$header $(boot)") ;;
            "$header "*) status=2 ;;
            *) die "$state is no record of ours; name another with --state" 1 ;;
            esac
            continue
        fi
        case $line in
        *..*) die "$state has a line that we did not write: $line" 1 ;;
        /proc/sys/*' '* | /proc/irq/*' '* | /sys/*' '*) ;;
        *) die "$state has a line that we did not write: $line" 1 ;;
        esac
        record+=("$line")
        recorded+="${line%% *} "
    done <"$state"
    [ $first = no ] || die "$state is empty and no record of ours; remove it if nothing was applied" 1
    return $status
}

# remember FILE... : adds to the record what these hold now, unless it holds them already; whole or not at all.
remember() {
    local file new=("${record[@]}") fresh="$state.$$"
    for file in "$@"; do
        case $recorded in *" $file "*) continue ;; esac
        case $file in */smp_affinity_list | /proc/sys/*) new+=("$file $(raw "$file")") ;; *) new+=("$file $(current "$file")") ;; esac
        recorded+="$file "
    done
    if [ -e "$state" ] && [ ${#new[@]} = ${#record[@]} ] && [ "${stale:-no}" = no ]; then return; fi
    if ! { mkdir -p "${state%/*}" && { echo "$header $(boot)" && printf '%s\n' ${new[@]+"${new[@]}"}; } >"$fresh" &&
        sync "$fresh" && mv "$fresh" "$state" && sync "${state%/*}"; } 2>/dev/null; then
        rm -f "$fresh" 2>/dev/null
        die "cannot write $state, so nothing is changed; name another place with --state" 1
    fi
    record=("${new[@]}")
    stale=no
}

# put FILE VALUE : writes, and looks whether it is so then; $reason says why not.
put() {
    local text=$2 before
    if [ -n "$root" ]; then
        # A tree of plain files does not answer as the kernel does: the choice is marked here.
        before=$(raw "$1")
        case $before in *\[*\]*) text=$(sed "s/\[\([^]]*\)\]/\1/; s/\(^\| \)$2\( \|\$\)/\1[$2]\2/" <<<"$before") ;; esac
    fi
    if ! reason=$({ printf '%s\n' "$text" >"$root$1"; } 2>&1); then
        reason=${reason##*: }
        return 1
    fi
    reason="written, but it still is $(plain "$(current "$1")")"
    [ "$(plain "$(current "$1")")" = "$(plain "$2")" ]
}

needs_root() {
    [ -n "$root" ] || [ "$dry" = yes ] || [ "$(id -u)" = 0 ] ||
        die "the kernel's settings are root's to change; run: sudo $0 $*; or look at what would be done with --dry-run" 1
}

# ---- printing -----------------------------------------------------------------------------------------------

separator="["
# json_line NAME VALUE... : one object of the list.
json_line() {
    local comma="" words text
    printf '%s\n  {' "$separator"
    separator=","
    while [ $# -gt 0 ]; do
        read -r -d '' -a words <<<"$2"
        text=${words[*]//[[:cntrl:]]/}
        text=${text//\\/\\\\}
        printf '%s"%s": "%s"' "$comma" "$1" "${text//\"/\\\"}"
        comma=", "
        shift 2
    done
    printf '}'
}

json_end() {
    if [ "$separator" = "[" ]; then printf '['; fi
    printf '\n]\n'
}
