/* Stalls for want of memory, as the kernel reports them (pressure stall information,
 * Documentation/accounting/psi.rst). */
#pragma once

/* A descriptor that poll() finds with POLLPRI when tasks have stalled for a tenth of two seconds: of the process's own
 * control group where it has one of version 2, else of the machine. POLLERR: the group is gone. -1: the kernel has no
 * such reports, or forbids them. Reads below `root` ("" for this machine). Any thread. */
int pressure_open(const char *root);
