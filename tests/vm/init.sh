#!/bin/busybox sh
# shellcheck shell=dash
# The first and only process of a guest: brings up its network and its drive, runs /job.sh, and ends the machine.
/bin/busybox mkdir -p /bin /sbin /proc /sys /dev /tmp /run
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mount -t tmpfs tmp /tmp
# In the order in which they need each other; what is built into a kernel is not among them.
while read -r module; do
    insmod "$module" || echo "guest: no $module"
done </modules
ip link set lo up
ip address add "$GUEST/24" dev eth0
ip link set eth0 up
echo "guest: $(uname -r) is up"
sh /job.sh
echo "guest: the job ended with $?"
poweroff -f
