#!/bin/bash
# First process of a container of a Grid Engine for tests: start master NODES... | start node
set -eu
dpkg --unpack /*.deb >/dev/null 2>&1
export SGE_ROOT=/var/lib/gridengine SGE_CELL=default
common=$SGE_ROOT/$SGE_CELL/common
id sgeadmin >/dev/null 2>&1 || useradd --system --home-dir /var/lib/gridengine sgeadmin
sed -i "s/^ignore_fqdn.*/ignore_fqdn true/" $common/bootstrap
# The addresses of containers lead to their names with that of the network behind.
for host in $TWINRUN_HOSTS; do echo "$host $host.$TWINRUN_NETWORK"; done > $common/host_aliases
echo "$TWINRUN_MASTER" > $common/act_qmaster
if [[ $1 == node ]]; then
  install -d -o sgeadmin -g sgeadmin /var/spool/gridengine/execd
  until getent hosts "$TWINRUN_MASTER" >/dev/null && qconf -sh 2>/dev/null | grep -q "$(hostname)"; do sleep 0.2; done
  /usr/sbin/sge_execd
  exec sleep infinity
fi
shift
for d in qmaster qmaster/job_scripts spooldb; do install -d -o sgeadmin -g sgeadmin /var/spool/gridengine/$d; done
chown -R sgeadmin $common
su -s /bin/sh -c "/usr/share/gridengine/scripts/init_cluster $SGE_ROOT $SGE_CELL /var/spool/gridengine/spooldb sgeadmin" sgeadmin
echo "$TWINRUN_MASTER" > $common/act_qmaster
/usr/sbin/sge_qmaster
until qconf -sh >/dev/null 2>&1; do sleep 0.2; done
as() { su -s /bin/bash -c "$1" sgeadmin; }
as "qconf -am root" || true
qconf -as "$(hostname)"
cat > /tmp/edit <<'EOE'
#!/bin/bash
sed -i 's/^schedule_interval.*/schedule_interval 0:0:2/; s/^min_uid.*/min_uid 0/; s/^min_gid.*/min_gid 0/; s/^hostlist.*/hostlist @allhosts/; s/^slots.*/slots 2/; s/^load_thresholds.*/load_thresholds NONE/; s/^pe_list.*/pe_list mpi1/; s/^shell_start_mode.*/shell_start_mode unix_behavior/; s/^shell .*/shell \/bin\/bash/' "$1"
# An editor that changes a file within its second is not believed.
sleep 1.1; touch "$1"
EOE
chmod +x /tmp/edit
# Nodes start their daemon when they are known, and it must find who may run jobs: root.
EDITOR=/tmp/edit qconf -mconf global
for node; do qconf -ah "$node"; done
{ echo "group_name @allhosts"; echo "hostlist $*"; } > /tmp/group; qconf -Ahgrp /tmp/group
cat > /tmp/pe <<EOP
pe_name mpi1
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args /bin/true
stop_proc_args /bin/true
allocation_rule 1
control_slaves TRUE
job_is_first_task TRUE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
EOP
qconf -Ap /tmp/pe
EDITOR=/tmp/edit qconf -msconf
EDITOR=/tmp/edit qconf -aq all.q
echo "the cluster is there"
exec sleep infinity
